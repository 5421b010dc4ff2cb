//! `POST /v1/operations`: the main path.

use crate::support::Ledger;

#[tokio::test]
async fn an_operation_sent_three_times_has_one_effect_and_one_receipt() {
    let ledger = Ledger::start().await;
    let agent = ledger.agent();
    let before = ledger.balance("acct-1").await;
    let first = agent.deposit("acme:d-1", "acct-1", 500).await.succeeded();
    assert!(!first.is_replay());
    for _ in 0..2 {
        let again = agent.deposit("acme:d-1", "acct-1", 500).await.succeeded();
        assert!(again.is_replay());
        assert_eq!(again.body, first.body);
    }
    assert_eq!(ledger.balance("acct-1").await, before + 500);
    let operation = agent.operation("acme:d-1").await;
    assert_eq!(
        (&operation["deliveries"], &operation["attempts"], &operation["effects"]),
        (&3.into(), &1.into(), &1.into())
    );
}

#[tokio::test]
async fn another_payload_under_a_known_id_is_refused_and_changes_nothing() {
    let ledger = Ledger::start().await;
    let agent = ledger.agent();
    let before = ledger.balance("acct-1").await;
    agent.deposit("acme:d-1", "acct-1", 500).await.succeeded();
    agent
        .deposit("acme:d-1", "acct-1", 501)
        .await
        .is(422, "fingerprint-mismatch");
    assert_eq!(ledger.balance("acct-1").await, before + 500);
}
