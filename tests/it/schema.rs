//! The rules of the schema, read from the catalogue: what a later migration must keep.

use sqlx::PgPool;

use crate::support::{Database, Ledger, run};

/// What a query finds, one text a row.
async fn found(sql: &PgPool, query: &'static str) -> Vec<String> {
    sqlx::query_scalar(query).fetch_all(sql).await.unwrap()
}

async fn none(query: &'static str) {
    let database = Database::create().await;
    assert_eq!(found(&database.sql, query).await, Vec::<String>::new());
}

/// Tables that belong to no tenant: processes, and the schema's own versions.
const OF_NO_TENANT: [&str; 2] = ["instances", "migrations"];

#[tokio::test]
async fn the_tenant_comes_first_in_every_table() {
    let database = Database::create().await;
    let other = found(
        &database.sql,
        "select c.relname::text from pg_class c join pg_namespace n on n.oid = c.relnamespace
         join pg_attribute a on a.attrelid = c.oid and a.attnum = 1
         where n.nspname = 'ledger' and c.relkind in ('r', 'p') and (a.attname <> 'tenant_id' or not a.attnotnull)
         order by 1",
    )
    .await;
    assert_eq!(other, OF_NO_TENANT);
}

#[tokio::test]
async fn the_tenant_comes_first_in_every_key_index_and_reference() {
    let database = Database::create().await;
    let other = found(
        &database.sql,
        "select distinct t.relname::text from pg_index i join pg_class t on t.oid = i.indrelid
         join pg_namespace n on n.oid = t.relnamespace
         join pg_attribute a on a.attrelid = t.oid and a.attnum = i.indkey[0]
         where n.nspname = 'ledger' and a.attname <> 'tenant_id' order by 1",
    )
    .await;
    assert_eq!(other, OF_NO_TENANT);
    let references = found(
        &database.sql,
        "select f.conname::text from pg_constraint f join pg_namespace n on n.oid = f.connamespace
         join pg_attribute a on a.attrelid = f.conrelid and a.attnum = f.conkey[1]
         where n.nspname = 'ledger' and f.contype = 'f' and a.attname <> 'tenant_id'",
    )
    .await;
    assert_eq!(references, Vec::<String>::new());
}

#[tokio::test]
async fn every_table_has_a_primary_key() {
    none(
        "select c.relname::text from pg_class c join pg_namespace n on n.oid = c.relnamespace
         where n.nspname = 'ledger' and c.relkind in ('r', 'p')
           and not exists (select from pg_index i where i.indrelid = c.oid and i.indisprimary)",
    )
    .await;
}

#[tokio::test]
async fn nothing_counts_by_itself_fires_by_itself_or_forgets_after_a_crash() {
    // Sequences, identity columns, triggers of ours, rules, unlogged or temporary relations.
    none(
        "select c.relname::text from pg_class c join pg_namespace n on n.oid = c.relnamespace
         where n.nspname = 'ledger' and (c.relkind = 'S' or c.relpersistence <> 'p')
         union all
         select a.attrelid::regclass || '.' || a.attname from pg_attribute a
         join pg_class c on c.oid = a.attrelid join pg_namespace n on n.oid = c.relnamespace
         where n.nspname = 'ledger' and (a.attidentity <> '' or a.attgenerated <> '')
         union all
         select t.tgname::text from pg_trigger t join pg_class c on c.oid = t.tgrelid
         join pg_namespace n on n.oid = c.relnamespace where n.nspname = 'ledger' and not t.tgisinternal
         union all
         select r.rulename::text from pg_rewrite r join pg_class c on c.oid = r.ev_class
         join pg_namespace n on n.oid = c.relnamespace where n.nspname = 'ledger'",
    )
    .await;
}

#[tokio::test]
async fn every_table_column_and_function_says_what_it_is_for() {
    none(
        "select c.relname::text from pg_class c join pg_namespace n on n.oid = c.relnamespace
         where n.nspname = 'ledger' and c.relkind in ('r', 'p') and obj_description(c.oid, 'pg_class') is null
         union all
         select c.relname || '.' || a.attname from pg_attribute a join pg_class c on c.oid = a.attrelid
         join pg_namespace n on n.oid = c.relnamespace
         where n.nspname = 'ledger' and c.relkind in ('r', 'p') and a.attnum > 0 and not a.attisdropped
           and col_description(c.oid, a.attnum) is null
         union all
         select p.proname::text from pg_proc p join pg_namespace n on n.oid = p.pronamespace
         where n.nspname = 'ledger' and obj_description(p.oid, 'pg_proc') is null",
    )
    .await;
}

#[tokio::test]
async fn times_have_a_zone_and_default_to_the_moment_not_to_the_transactions_begin() {
    none(
        "select c.relname || '.' || a.attname from pg_attribute a join pg_class c on c.oid = a.attrelid
         join pg_namespace n on n.oid = c.relnamespace left join pg_attrdef d on d.adrelid = c.oid and d.adnum = a.attnum
         where n.nspname = 'ledger' and c.relkind in ('r', 'p') and a.attnum > 0
           and (a.atttypid in ('timestamp'::regtype, 'date'::regtype, 'time'::regtype)
                or (a.atttypid = 'timestamptz'::regtype and d.oid is not null
                    and pg_get_expr(d.adbin, d.adrelid) <> 'clock_timestamp()'))",
    )
    .await;
}

#[tokio::test]
async fn nobody_but_the_owner_and_the_service_may_do_anything() {
    let database = Database::create().await;
    let open = found(
        &database.sql,
        "select p.proname::text from pg_proc p join pg_namespace n on n.oid = p.pronamespace
         where n.nspname = 'ledger' and exists
             (select from aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a where a.grantee = 0)
         union all
         select c.relname::text from pg_class c join pg_namespace n on n.oid = c.relnamespace
         where n.nspname = 'ledger' and exists (select from aclexplode(c.relacl) a where a.grantee = 0)",
    )
    .await;
    assert_eq!(open, Vec::<String>::new());
}

/// Each is applied to a stored operation, in a transaction of its own that is rolled back.
const IMPOSSIBLE: [(&str, &str); 27] = [
    ("an unknown state", "update ledger.operations set state = 'done'"),
    (
        "success without a time",
        "update ledger.operations set settled_at = null, receipt_expires_at = null",
    ),
    (
        "a settled time on a planned one",
        "update ledger.operations set state = 'planned', attempt = 0",
    ),
    (
        "settled without an expiry",
        "update ledger.operations set receipt_expires_at = null",
    ),
    (
        "running without a claimer",
        "update ledger.operations set state = 'running', settled_at = null, receipt_expires_at = null",
    ),
    (
        "running before its first attempt",
        "update ledger.operations set state = 'running', settled_at = null, receipt_expires_at = null,
         attempt = 0, instance_id = gen_random_uuid()",
    ),
    (
        "a claim on a settled one",
        "update ledger.operations set instance_id = gen_random_uuid()",
    ),
    (
        "waiting without a due time",
        "update ledger.operations set state = 'retry_wait', settled_at = null, receipt_expires_at = null",
    ),
    (
        "planned with an attempt",
        "update ledger.operations set state = 'planned', settled_at = null, receipt_expires_at = null",
    ),
    (
        "a payload gone before the purge",
        "update ledger.operations set payload = null",
    ),
    (
        "a purged one that keeps its payload",
        "update ledger.operations set purged_at = clock_timestamp()",
    ),
    (
        "an unsettled one that is purged",
        "update ledger.operations set state = 'planned', attempt = 0, settled_at = null, receipt_expires_at = null,
         payload = null, purged_at = clock_timestamp()",
    ),
    (
        "an id with a blank",
        "update ledger.operations set operation_id = 'a b'",
    ),
    ("an empty id", "update ledger.operations set operation_id = ''"),
    (
        "an id of 256 bytes",
        "update ledger.operations set operation_id = repeat('a', 256)",
    ),
    ("an id beyond ASCII", "update ledger.operations set operation_id = 'é'"),
    (
        "another form of fingerprint",
        "update ledger.operations set fingerprint = 'sha256:00'",
    ),
    ("an attempt below zero", "update ledger.operations set attempt = -1"),
    (
        "a receipt that is no HTTP answer",
        "update ledger.receipts set status = 42",
    ),
    (
        "a receipt with headers of another form",
        "update ledger.receipts set headers = '{}'",
    ),
    (
        "an answer too large to store that is stored",
        "update ledger.receipts set omitted_bytes = octet_length(body)",
    ),
    (
        "an answer too large to store that had no bytes",
        "update ledger.receipts set omitted_bytes = 0, body = ''",
    ),
    (
        "an unknown operation with a settled time",
        "update ledger.operations set state = 'needs_reconciliation'",
    ),
    (
        "a request with headers of another form",
        "insert into ledger.requests values ('demo', 'd-1', 'POST', '/', '{}', '', 'key', clock_timestamp())",
    ),
    (
        "a link of an unknown kind",
        "insert into ledger.links values ('demo', 'd-1', 'resembles', 'd-2')",
    ),
    ("a history that begins at zero", "update ledger.history set version = 0"),
    ("a key with an unknown role", "update ledger.api_keys set role = 'root'"),
];

#[tokio::test]
async fn impossible_rows_cannot_be_stored() {
    let ledger = Ledger::start().await;
    ledger.agent().deposit("d-1", "acct-1", 1).await.succeeded();
    for (what, statement) in IMPOSSIBLE {
        let mut transaction = ledger.sql.begin().await.unwrap();
        let refused = sqlx::query(statement).execute(&mut *transaction).await.expect_err(what);
        let code = refused
            .as_database_error()
            .and_then(|error| error.code().map(|code| code.into_owned()));
        // check_violation, and nothing else: a mistake in the statement would be another error.
        assert_eq!(code.as_deref(), Some("23514"), "{what}: {refused}");
    }
}

#[tokio::test]
async fn a_second_operation_under_one_id_cannot_be_stored() {
    let ledger = Ledger::start().await;
    ledger.agent().deposit("d-1", "acct-1", 1).await.succeeded();
    let more = "insert into ledger.requests values ('demo', 'd-1', 'POST', '/', '[]', '', 'key', clock_timestamp()); \
                insert into ledger.links values ('demo', 'd-1', 'compensates', 'd-2')";
    run(&ledger.sql, more).await;
    for table in ["operations", "receipts", "history", "requests", "links"] {
        let again = format!("insert into ledger.{table} select * from ledger.{table}");
        let refused = sqlx::query(sqlx::AssertSqlSafe(again))
            .execute(&ledger.sql)
            .await
            .expect_err(table);
        assert_eq!(
            refused.as_database_error().unwrap().code().as_deref(),
            Some("23505"),
            "{table}"
        );
    }
}

/// What must not occur in the program's SQL, and why.
const FORBIDDEN: [(&str, &str); 8] = [
    (
        "now()",
        "stands still from the transaction's begin; use clock_timestamp() or statement_timestamp()",
    ),
    ("current_timestamp", "stands still from the transaction's begin"),
    (
        "pg_advisory_lock",
        "a session's lock outlives its transaction behind a pooler",
    ),
    (
        "pg_try_advisory_lock",
        "a session's lock outlives its transaction behind a pooler",
    ),
    ("create temp", "session state"),
    ("pg_notify", "takes a global lock at commit"),
    ("search_path =", "session state; names are qualified"),
    ("nextval", "no serials"),
];

#[test]
fn the_programs_sql_keeps_to_the_same_rules() {
    let mut files = Vec::new();
    for directory in ["src/ledger", "src/engine", "migrations"] {
        collect(
            &std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(directory),
            &mut files,
        );
    }
    assert!(files.len() > 20, "the sources are where this looks: {files:?}");
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap().to_ascii_lowercase();
        for (number, line) in text.lines().enumerate() {
            let code = line.split("--").next().unwrap_or_default();
            let is_comment = code.trim_start().starts_with("//");
            for (forbidden, why) in FORBIDDEN {
                let found = !is_comment && code.replace("instant::now()", "").contains(forbidden);
                assert!(!found, "{}:{}: {forbidden}: {why}", file.display(), number + 1);
            }
        }
    }
}

fn collect(directory: &std::path::Path, files: &mut Vec<std::path::PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, files);
        } else if path
            .extension()
            .is_some_and(|extension| extension == "rs" || extension == "sql")
        {
            files.push(path);
        }
    }
}
