//! A group's one statement: what it stores is what this program would have written, and it claims before it runs.

use std::sync::Arc;
use std::time::Duration;

use opledger::ledger::claim::{self, Won};
use opledger::ledger::fingerprint::Fingerprint;
use opledger::ledger::kind::Kind;
use opledger::ledger::operation_id::OperationId;
use opledger::ledger::receipt::{self, Receipt, Settled};
use opledger::ledger::settlement::Applied;
use opledger::ledger::submission::Submission;
use opledger::postgres::pool::Pool;
use opledger::postgres::session::Limits;
use serde_json::value::RawValue;
use sqlx::Row;
use time::OffsetDateTime;

use crate::support::{Database, TENANT, open, run};

/// A handler that gives back what it was given, and one that tells how many were claimed and had run before it.
const SQL: &str = "
    create schema it;
    grant usage on schema it to opledger;
    create table it.ran (id text);
    create function it.echo(payload jsonb, operation jsonb) returns jsonb language sql as $$ select payload $$;
    create function it.census(payload jsonb, operation jsonb) returns jsonb
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
    declare
        seen constant jsonb := jsonb_build_array(
            (select count(*) from ledger.operations), (select count(*) from it.ran));
    begin
        insert into it.ran values (operation->>'id');
        if payload->>0 = 'refuse' then
            raise exception using errcode = 'OL001';
        end if;
        return seen;
    end
    $$;
";

fn submission(id: &str, handler: &str, payload: &str) -> Submission {
    let kind = Kind {
        name: handler.into(),
        handler: format!("it.{handler}").parse().unwrap(),
        schema: None,
        retention: Duration::from_secs(60),
        timeout: Duration::from_secs(10),
        group_commit: true,
    };
    Submission {
        tenant: TENANT.parse().unwrap(),
        id: OperationId::parse(id).unwrap(),
        fingerprint: Fingerprint::of_canonical(handler, payload.as_bytes()),
        kind: Arc::new(kind),
        payload: payload.into(),
        canonical: payload.into(),
        run: None,
        external_reference: None,
        requested_by: "key".into(),
        trace_parent: None,
    }
}

/// Performs them in one group that commits; answers in order of id.
async fn perform(pool: &Pool, submissions: &mut [Submission]) -> Vec<Won> {
    submissions.sort_by(|left, right| left.id.cmp(&right.id));
    let limits = Limits {
        lock: Duration::from_secs(5),
        statement: Duration::from_secs(10),
    };
    let mut session = pool.transaction(limits).await.unwrap();
    let group: Vec<&Submission> = submissions.iter().collect();
    let won = claim::perform_all(&mut session, &TENANT.parse().unwrap(), 1 << 20, &group)
        .await
        .unwrap();
    session.commit_after_handlers().await.unwrap();
    won.into_iter().map(|won| won.expect("every id was free")).collect()
}

async fn database() -> (Database, Pool) {
    let database = Database::create().await;
    run(&database.sql, SQL).await;
    let pool = open(&database.service_url).await;
    (database, pool)
}

#[tokio::test]
async fn the_database_writes_a_success_to_the_byte_as_this_program_does() {
    let (database, pool) = database().await;
    let payloads = [
        "null",
        "1e3",
        "0.1000",
        "-0",
        r#""""#,
        r#""\u00e9 \ud83d\ude00 \u2028 \u007f \u0001 \\ \" / <&> \t""#,
        r#"{"é": "ÿ\u200b", "b": [1, {"": null}], "a": true}"#,
        "[[[[[]]]]]",
    ];
    let mut submissions: Vec<Submission> = payloads
        .iter()
        .enumerate()
        .map(|(number, payload)| submission(&format!(r#"odd-{number}-"quoted"\{{}}'%"#), "echo", payload))
        .collect();
    let won = perform(&pool, &mut submissions).await;
    for (submission, won) in submissions.iter().zip(won) {
        let result: String = sqlx::query_scalar("select $1::jsonb::text")
            .bind(&*submission.payload)
            .fetch_one(&database.sql)
            .await
            .unwrap();
        let settled = Settled {
            id: &submission.id,
            kind: "echo",
            fingerprint: &submission.fingerprint,
            attempt: 1,
            settled_at: won.times.settled_at,
        };
        let written = Receipt::succeeded(settled, &RawValue::from_string(result).unwrap());
        let Applied::Returned(told) = won.applied else {
            panic!("{:?}", won.applied)
        };
        assert_eq!(told, written);
        let row =
            sqlx::query("select status, headers::text, body, body_sha256 from ledger.receipts where operation_id = $1")
                .bind(submission.id.as_str())
                .fetch_one(&database.sql)
                .await
                .unwrap();
        assert_eq!(row.get::<i16, _>(0).cast_unsigned(), written.status);
        let headers: Vec<(String, String)> = serde_json::from_str(row.get(1)).unwrap();
        assert_eq!(headers, written.headers);
        assert_eq!(row.get::<Vec<u8>, _>(2), written.body, "{}", submission.payload);
        assert_eq!(row.get::<Vec<u8>, _>(3), written.body_sha256);
    }
}

#[tokio::test]
async fn the_database_writes_times_as_this_program_does() {
    let (database, _pool) = database().await;
    let mut session = database.sql.acquire().await.unwrap();
    sqlx::raw_sql("set time zone 'Asia/Kathmandu'; set datestyle = 'German'")
        .execute(&mut *session)
        .await
        .unwrap();
    let day = 86_400_000_000;
    for microseconds in [
        0,
        1,
        120,
        100_000,
        999_999,
        1_000_000,
        59_999_999,
        day - 1,
        366 * day + 500_000,
    ] {
        for start in [
            "0999-12-31T23:59:59Z",
            "1969-12-31T23:59:59Z",
            "2024-02-29T00:00:00Z",
            "2026-12-31T23:59:59Z",
        ] {
            let start = OffsetDateTime::parse(start, &time::format_description::well_known::Rfc3339).unwrap();
            let time = start + time::Duration::microseconds(microseconds);
            let written: String = sqlx::query_scalar("select to_char($1::timestamptz at time zone 'UTC', $2)")
                .bind(time)
                .bind(receipt::TIME_IN_SQL)
                .fetch_one(&mut *session)
                .await
                .unwrap();
            assert_eq!(written, receipt::format_time(time));
        }
    }
}

#[tokio::test]
async fn a_group_is_claimed_before_it_runs_and_runs_in_order_of_id() {
    let (database, pool) = database().await;
    // As often as it takes for a statement's plan to be kept, and more; and groups of every size.
    let mut before = 0_usize;
    for size in [1, 3, 64, 2, 40, 5, 1, 7, 64, 30, 4, 1] {
        let mut group: Vec<Submission> = (0..size)
            .map(|number| {
                let refuses = number == size / 2 && size > 1;
                let payload = if refuses { r#"["refuse"]"# } else { "[]" };
                submission(&format!("census-{before}-{number:02}"), "census", payload)
            })
            .collect();
        let ran = usize::try_from(
            sqlx::query_scalar::<_, i64>("select count(*) from it.ran")
                .fetch_one(&database.sql)
                .await
                .unwrap(),
        )
        .unwrap();
        let won = perform(&pool, &mut group).await;
        let mut expected = ran;
        for (submission, won) in group.iter().zip(won) {
            match won.applied {
                Applied::Returned(receipt) => {
                    let body: serde_json::Value = serde_json::from_slice(&receipt.body).unwrap();
                    assert_eq!(
                        body["result"],
                        serde_json::json!([before + size, expected]),
                        "{}",
                        submission.id
                    );
                    assert_eq!(body["operation_id"], submission.id.as_str());
                    expected += 1;
                }
                // What it did is undone, and the others go on.
                Applied::Refused(_) => assert_eq!(&*submission.payload, r#"["refuse"]"#),
                Applied::Passing(raised) | Applied::Broken(raised) => panic!("{raised:?}"),
            }
        }
        before += size;
    }
}
