//! What the program writes to stderr: a line an event, whatever others have written into it.

use crate::starting::Started;
use crate::support::{Client, Database, TENANT, run, write_config};

/// Turns the text around, hides a line behind another one, forges a third.
const HOSTILE: &str = "a\u{202e}b\u{1b}[2Kc\nd\u{2028}e";

const SQL: &str = "
    create function shop.say(payload jsonb, operation jsonb) returns jsonb language plpgsql as $$
    begin raise exception using errcode = '42501', message = payload->>'text'; end $$;
    grant execute on function shop.say(jsonb, jsonb) to opledger;
";

#[tokio::test]
async fn what_callers_and_handlers_write_stays_within_its_line_and_reads_as_it_is() {
    let database = Database::create().await;
    run(&database.sql, SQL).await;
    let keys = database.keys(TENANT).await;
    let (_directory, config) = write_config("[kinds.say]\nhandler = \"shop.say\"\n");
    for format in ["text", "json"] {
        let config = config.to_str().unwrap();
        let serve = [
            "serve",
            "--listen",
            "127.0.0.1:0",
            "--log-format",
            format,
            "--config",
            config,
        ];
        let mut process = Started::new(&serve, &database.service_url);
        process.says("serving").await;
        let said = process.seen.last().unwrap().replace(['"', '=', ','], " ");
        let address = said
            .split_whitespace()
            .find(|word| word.starts_with("127.0.0.1:"))
            .unwrap();
        let body = serde_json::json!({
            "operation_id": format!("log-{format}"), "kind": "say", "payload": {"text": HOSTILE},
            "run": {"engine": "e", "run_id": "r\u{202e}\u{2028}"},
        });
        Client::new(address.parse().unwrap(), &keys["agent"])
            .post("/v1/operations", &body.to_string())
            .await
            .is(500, "handler-broken");
        process.says("a handler is broken").await;
        let line = process.seen.last().unwrap();
        assert!(!line.contains(['\u{202e}', '\u{1b}', '\u{2028}']), "{line:?}");
        let (raised, run) = if format == "text" {
            (r"a\u{202e}b\u{1b}[2Kc\nd\u{2028}e", r"r\u{202e}\u{2028}")
        } else {
            (r"a\u202eb\u001b[2Kc\nd\u2028e", r"r\u202e\u2028")
        };
        assert!(line.contains(raised) && line.contains(run), "{line}");
    }
}
