//! An operation whose outcome is unknown, as the people see it who have to settle it: what happened last, whether
//! anybody goes on by itself, and what they can do.
//!
//! Commands are written so that they can be pasted: ids come from callers, and may hold what a shell acts on.

use serde::Serialize;

use super::show::{Event, Operation, RELATION_UNDONE_BY};
use crate::ledger::operation::StateName;

/// What people are told to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Advice(pub Vec<String>);

impl Operation<'_> {
    pub fn is_unknown(&self) -> bool {
        self.state == StateName::NeedsReconciliation.as_str()
    }

    /// What happened last.
    pub fn last(&self) -> Option<&Event<'_>> {
        self.history.last()
    }

    /// Since when nobody knows: the first of the latest changes that left it so.
    pub fn unknown_since(&self) -> Option<&str> {
        let unknown = |event: &&Event<'_>| event.state == StateName::NeedsReconciliation.as_str();
        let first = self.history.iter().rev().take_while(unknown).last()?;
        Some(&first.at)
    }

    /// Whether recovery goes on without anybody's doing, and when.
    pub fn recovery(&self) -> String {
        match &self.due_at {
            Some(due_at) => format!("goes on by itself at {due_at}"),
            None => "has ended: only a person can decide".to_owned(),
        }
    }

    /// Whether it succeeded once, before somebody wanted it undone.
    fn has_succeeded(&self) -> bool {
        let succeeded = StateName::Succeeded.as_str();
        self.history.iter().any(|event| event.state == succeeded)
    }

    /// What to do about an unknown.
    pub fn advice(&self) -> Advice {
        let mut steps = Vec::new();
        let reversal = self.links.iter().find(|link| link.relation == RELATION_UNDONE_BY);
        match (&self.due_at, reversal) {
            (Some(due_at), _) => steps.push(format!(
                "wait: it is looked after again at {due_at}; or find out yourself"
            )),
            (None, Some(reversal)) => steps.push(format!(
                "its reversal did not undo it: opledger operations get {}",
                shell(&reversal.operation_id)
            )),
            (None, None) => {}
        }
        let id = shell(&self.operation_id);
        if self.has_succeeded() {
            // Its receipt is out in the world: neither is it sent again, nor said to have had no effect.
            steps.push(format!(
                "find out whether its effect still stands, and undo it by hand if it must not: {}",
                self.target
            ));
            steps.push(format!(
                "then: opledger operations resolve --verdict succeeded --reason '…' {id}; callers keep their receipt"
            ));
            return Advice(steps);
        }
        steps.push(format!("find out whether it acted: {}", self.target));
        steps.push(format!(
            "if it did: opledger operations resolve --verdict succeeded --reason '…' {id} \
             (callers get a short statement of that; with --answer-status and --answer-body, the answer that was lost)"
        ));
        steps.push(format!(
            "if not: --verdict not-executed lets it be sent again, --verdict failed ends it; in doubt: opledger operations history {id}"
        ));
        Advice(steps)
    }
}

/// An argument as a shell takes it, whatever is in it; after `--` where it would be a flag.
pub fn shell(argument: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./:@%+=,".contains(&byte);
    let quoted = if !argument.is_empty() && argument.bytes().all(plain) {
        argument.to_owned()
    } else {
        format!("'{}'", argument.replace('\'', r"'\''"))
    };
    if argument.starts_with('-') {
        format!("-- {quoted}")
    } else {
        quoted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_id_acts_when_it_is_pasted_into_a_shell() {
        for (id, pasted) in [
            ("acme:order-1/2%:rev-1", "acme:order-1/2%:rev-1"),
            ("a;rm$IFS-rf$IFS~", "'a;rm$IFS-rf$IFS~'"),
            ("it's`id`", r"'it'\''s`id`'"),
            ("--yes", "-- --yes"),
            ("-$(id)", "-- '-$(id)'"),
        ] {
            assert_eq!(shell(id), pasted);
        }
    }
}
