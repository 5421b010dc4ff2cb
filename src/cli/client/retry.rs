//! Sending again: the very same request, with the same operation id, as long as that may help.

use std::time::Duration;

use super::answer::Answer;
use super::{Client, Error, Request};
use crate::cli::exit::chain;
use crate::cli::output;

/// Longest `Retry-After` that is waited for; beyond it a person should know first.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// How often to send again.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct RetryArgs {
    /// Send again up to N times, with the same id, when nothing answered or the service said that it may help
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=100))]
    pub retries: u32,
}

impl Client {
    /// Sends, and sends the very same again as long as that may help.
    pub async fn send_again(&self, request: &Request, retries: u32) -> Result<Answer, Error> {
        let mut tried = 0;
        loop {
            let result = self.send(request).await;
            let Some(pause) = pause(tried, &result).filter(|_| tried < retries) else {
                return result;
            };
            tried += 1;
            let seconds = pause.as_secs_f64();
            output::say(&format!(
                "{}; try {} of {} in {seconds:.1} s",
                why(&result),
                tried + 1,
                retries + 1
            ));
            tokio::time::sleep(pause).await;
        }
    }
}

/// How long to wait before sending the same request again; `None` when that would not help.
fn pause(tried: u32, result: &Result<Answer, Error>) -> Option<Duration> {
    let told = match result {
        Err(Error::Connect { .. } | Error::Timeout { .. } | Error::Broken { .. }) => None,
        Err(
            Error::Address { .. } | Error::Key | Error::Trust { .. } | Error::Request { .. } | Error::TooLarge { .. },
        ) => {
            return None;
        }
        // A downstream's own answer is final, whatever it says about itself.
        Ok(answer) if answer.is_downstreams() => return None,
        Ok(answer) => {
            let passing = matches!(answer.status.as_u16(), 502..=504);
            if !answer.problem().map_or(passing, |problem| problem.retryable) {
                return None;
            }
            answer.retry_after()
        }
    };
    match told {
        Some(told) => Some(told).filter(|told| *told <= LONGEST_PAUSE),
        None => Some(backoff(tried)),
    }
}

/// Exponential with jitter, from a tenth of a second to five.
fn backoff(tried: u32) -> Duration {
    let ceiling = (200u64 << tried.min(5)).min(5_000);
    // Without randomness the pause is merely the longest one.
    let random = getrandom::u64().unwrap_or(u64::MAX);
    Duration::from_millis(ceiling / 2 + random % (ceiling / 2 + 1))
}

fn why(result: &Result<Answer, Error>) -> String {
    match result {
        Err(error) => chain(error),
        Ok(answer) => match answer.problem() {
            Some(problem) => format!("{}: {}", problem.code, problem.detail),
            None => format!("status {}", answer.status.as_u16()),
        },
    }
}

#[cfg(test)]
mod tests {
    use http::header::RETRY_AFTER;
    use http::{HeaderMap, StatusCode};

    use super::*;

    fn answer(status: u16, retry_after: Option<&str>, body: &str) -> Result<Answer, Error> {
        let mut headers = HeaderMap::new();
        if let Some(seconds) = retry_after {
            headers.insert(RETRY_AFTER, seconds.parse().unwrap());
        }
        Ok(Answer {
            status: StatusCode::from_u16(status).unwrap(),
            headers,
            body: body.to_owned().into(),
        })
    }

    #[test]
    fn only_what_may_help_is_sent_again() {
        let busy = r#"{"code":"operation-in-progress","detail":"","retryable":true}"#;
        let unknown = r#"{"code":"outcome-unknown","detail":"","retryable":false}"#;
        assert_eq!(pause(0, &answer(409, Some("3"), busy)), Some(Duration::from_secs(3)));
        assert_eq!(
            pause(0, &answer(503, Some("3600"), busy)),
            None,
            "a person should know first"
        );
        assert_eq!(pause(0, &answer(409, None, unknown)), None);
        assert_eq!(pause(0, &answer(200, None, "{}")), None);
        assert!(pause(0, &answer(502, None, "<html>")).is_some());
        assert_eq!(pause(0, &answer(500, None, "<html>")), None);
        let mut theirs = answer(503, None, busy).unwrap();
        theirs.headers.insert("operation-id", "a".parse().unwrap());
        assert_eq!(pause(0, &Ok(theirs)), None, "a downstream's answer is final");
        assert!(
            pause(
                9,
                &Err(Error::Timeout {
                    base: String::new(),
                    seconds: 1
                })
            )
            .unwrap()
                <= Duration::from_secs(5)
        );
        assert_eq!(pause(0, &Err(Error::Key)), None);
    }
}
