//! A business that only counts: each run of its handler leaves a row, and no key would stop a second one. So effects are
//! counted where they happen, and `audit` compares them with what the ledger says and with what callers were told.

use std::collections::HashSet;
use std::time::Duration;

use sqlx::PgPool;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::client::{Answer, Client};
use super::random::Random;
use super::run;

/// The business, run by the owner. Each receipt has a number nobody could guess: two runs never look alike.
pub const SQL: &str = r"
    create table shop.notes (tenant_id text not null, operation_id text not null, attempt integer not null);
    create function shop.note(payload jsonb, operation jsonb) returns jsonb
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
    begin
        insert into shop.notes values (operation->>'tenant', operation->>'id', (operation->>'attempt')::integer);
        if payload ? 'pause' then
            perform pg_sleep((payload->>'pause')::float8);
        end if;
        if payload ? 'refuse' then
            raise exception using errcode = 'OL001', message = 'refused, as asked';
        end if;
        return jsonb_build_object('nonce', gen_random_uuid());
    end
    $$;
    revoke execute on function shop.note(jsonb, jsonb) from public;
    grant execute on function shop.note(jsonb, jsonb) to opledger;
";

/// Its kinds: in groups, and each operation in a transaction of its own.
pub const KINDS: &str = r#"
    [kinds."note"]
    handler = "shop.note"
    [kinds."note.alone"]
    handler = "shop.note"
    group_commit = false
"#;

/// One operation as its caller remembers it.
#[derive(Debug, Clone)]
pub struct Sent {
    pub id: String,
    pub kind: &'static str,
    pub payload: &'static str,
    pub respond_async: bool,
    /// What was acknowledged: a receipt, or the promise of one (202). Anything else acknowledges nothing.
    pub acknowledged: Option<Answer>,
}

impl Sent {
    pub fn new(id: String, kind: &'static str) -> Self {
        Self {
            id,
            kind,
            payload: "{}",
            respond_async: false,
            acknowledged: None,
        }
    }

    /// One of the forms an operation can take.
    pub fn any(id: String, random: &mut Random) -> Self {
        let kind = if random.below(4) == 0 { "note.alone" } else { "note" };
        let payload = if random.below(8) == 0 {
            r#"{"refuse":true}"#
        } else {
            "{}"
        };
        Self {
            id,
            kind,
            payload,
            respond_async: random.below(6) == 0,
            acknowledged: None,
        }
    }

    /// Sends it once, and keeps what was acknowledged. A receipt, once told, is told again to the byte.
    pub async fn send(&mut self, client: &Client) -> anyhow::Result<Answer> {
        let headers: &[(&str, &str)] = if self.respond_async {
            &[("prefer", "respond-async")]
        } else {
            &[]
        };
        let answer = client.try_submit(&self.id, self.kind, self.payload, headers).await?;
        if let Some(before) = self.acknowledged.as_ref().filter(|before| is_receipt(before))
            && (is_receipt(&answer) || answer.status == 202)
        {
            assert_eq!(
                (answer.status, &answer.body),
                (before.status, &before.body),
                "{}: another receipt",
                self.id
            );
        }
        if is_receipt(&answer) || answer.status == 202 {
            self.acknowledged = Some(answer.clone());
        }
        Ok(answer)
    }

    /// Sends it again and again until it is settled.
    pub async fn settle(&mut self, client: &Client) -> Answer {
        let give_up_at = std::time::Instant::now() + Duration::from_secs(30);
        loop {
            let answer = self.send(client).await;
            match &answer {
                Ok(answer) if is_receipt(answer) => return answer.clone(),
                // Accepted, in progress, unavailable: all say to come back.
                Ok(answer) if matches!(answer.status, 202 | 409 | 429 | 503) => {}
                Err(_) => {}
                Ok(other) => panic!(
                    "{}: {} {:?}",
                    self.id,
                    other.status,
                    String::from_utf8_lossy(&other.body)
                ),
            }
            assert!(
                std::time::Instant::now() < give_up_at,
                "{} is stuck: {answer:?}",
                self.id
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

/// A receipt: a success, or a refusal by a business rule.
pub fn is_receipt(answer: &Answer) -> bool {
    answer.status == 200 || answer.code() == "operation-failed"
}

/// Sends all of it until everything is settled, on 32 connections.
pub async fn settle_all(sent: Vec<Sent>, client: &Client) -> Vec<Sent> {
    let mut shares = vec![Vec::new(); 32];
    for (turn, one) in sent.into_iter().enumerate() {
        shares[turn % 32].push(one);
    }
    let mut senders = JoinSet::new();
    for mut share in shares {
        let client = client.clone();
        senders.spawn(async move {
            for one in &mut share {
                one.settle(&client).await;
            }
            share
        });
    }
    senders.join_all().await.concat()
}

/// New operations from 32 clients, one after the other each, until told to stop or the service is gone.
/// `name` tells them from those of other calls.
pub async fn load(client: &Client, name: &str, random: &mut Random, stop: &CancellationToken) -> Vec<Sent> {
    let mut senders = JoinSet::new();
    for sender in 0..32 {
        let (client, name, mut random, stop) = (client.clone(), name.to_owned(), random.split(), stop.clone());
        senders.spawn(async move {
            let mut sent = Vec::new();
            while !stop.is_cancelled() {
                let mut one = Sent::any(format!("{name}:{sender}:{}", sent.len()), &mut random);
                let answer = stop.run_until_cancelled(one.send(&client)).await;
                sent.push(one);
                if !matches!(answer, Some(Ok(_))) {
                    break;
                }
            }
            sent
        });
    }
    senders.join_all().await.concat()
}

pub async fn install(sql: &PgPool) {
    run(sql, SQL).await;
}

/// Effects of one operation.
pub async fn effects(sql: &PgPool, id: &str) -> i64 {
    sqlx::query_scalar("select count(*) from shop.notes where operation_id = $1")
        .bind(id)
        .fetch_one(sql)
        .await
        .unwrap()
}

/// Holds the whole of it to account, once everything has been settled:
/// one effect for each success and none for anything else, one receipt each, nothing unsettled, nothing orphaned.
pub async fn audit(sql: &PgPool, sent: &[Sent]) {
    let counts = [
        (
            "operations with two effects",
            "select count(*) from (select from shop.notes group by operation_id having count(*) > 1) x",
        ),
        (
            "effects without a success",
            "select count(*) from shop.notes n where not exists
                (select from ledger.operations o where o.operation_id = n.operation_id and o.state = 'succeeded')",
        ),
        (
            "successes without an effect",
            "select count(*) from ledger.operations o where o.state = 'succeeded' and o.kind like 'note%'
                and not exists (select from shop.notes n where n.operation_id = o.operation_id)",
        ),
        (
            "unsettled operations",
            "select count(*) from ledger.operations where settled_at is null",
        ),
        (
            "settled operations without a receipt",
            "select count(*) from ledger.operations o where not exists
                (select from ledger.receipts r where r.tenant_id = o.tenant_id and r.operation_id = o.operation_id)",
        ),
        (
            "receipts without an operation",
            "select count(*) from ledger.receipts r where not exists
                (select from ledger.operations o where r.tenant_id = o.tenant_id and r.operation_id = o.operation_id)",
        ),
        (
            "requests without an operation",
            "select count(*) from ledger.requests r where not exists (select from ledger.operations o
                where r.tenant_id = o.tenant_id and r.operation_id = o.operation_id and o.downstream is not null)",
        ),
        (
            "operations of a downstream without a request",
            "select count(*) from ledger.operations o where o.downstream is not null and o.purged_at is null and not exists
                (select from ledger.requests r where r.tenant_id = o.tenant_id and r.operation_id = o.operation_id)",
        ),
        (
            "links without one of their operations, or without the way back",
            "select count(*) from ledger.links l where not exists (select from ledger.operations o
                where o.tenant_id = l.tenant_id and o.operation_id = l.operation_id) or not exists (select from ledger.links b
                where b.tenant_id = l.tenant_id and b.operation_id = l.other_id and b.other_id = l.operation_id
                  and b.relation <> l.relation)",
        ),
        (
            "operations whose history is not whole",
            "select count(*) from ledger.operations o where array(select h.version from ledger.history h
                where h.tenant_id = o.tenant_id and h.operation_id = o.operation_id order by 1)
                is distinct from array(select generate_series(1, o.version))",
        ),
        (
            "operations settled twice",
            "select count(*) from (select from ledger.history where state in ('succeeded', 'failed')
                group by tenant_id, operation_id having count(*) > 1) x",
        ),
    ];
    for (what, query) in counts {
        let found: i64 = sqlx::query_scalar(query).fetch_one(sql).await.unwrap();
        assert_eq!(found, 0, "{what}");
    }
    let stored: Vec<String> = sqlx::query_scalar("select operation_id from ledger.operations")
        .fetch_all(sql)
        .await
        .unwrap();
    let stored: HashSet<String> = stored.into_iter().collect();
    for one in sent {
        assert!(stored.contains(&one.id), "{} is lost", one.id);
    }
}
