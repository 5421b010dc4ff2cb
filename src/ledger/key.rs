//! API keys: who may do what within a tenant.
//!
//! A key is `opl_<tenant>_<key id>_<secret>`. The prefix and the fixed lengths let leak scanners find one by
//! `opl_[a-z0-9-]{1,40}_[0-9A-Za-z]{16}_[0-9A-Za-z]{43}`. Only its SHA-256 is stored: 43 base-62 characters carry 256
//! random bits, which no slow hash has to protect.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use time::OffsetDateTime;

use super::tenant::Tenant;
use crate::postgres::error::{Error, doing};
use crate::postgres::session::Session;

/// What a key is for. Rights are per role and do not include one another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Submits, plans, cancels its own, reads.
    Agent,
    /// Decides on what waits for approval, reads.
    Approver,
    /// Reads everything, settles unknowns, purges.
    Operator,
    /// Makes and revokes keys.
    Admin,
}

impl Role {
    pub const ALL: [Self; 4] = [Self::Agent, Self::Approver, Self::Operator, Self::Admin];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Approver => "approver",
            Self::Operator => "operator",
            Self::Admin => "admin",
        }
    }
}

impl FromStr for Role {
    type Err = InvalidRole;

    fn from_str(name: &str) -> Result<Self, InvalidRole> {
        Self::ALL
            .into_iter()
            .find(|role| role.as_str() == name)
            .ok_or(InvalidRole)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a role is one of agent, approver, operator, admin")]
pub struct InvalidRole;

/// Who is calling: what the credential says, and nothing from the body.
#[derive(Debug, Clone)]
pub struct Caller {
    pub tenant: Tenant,
    pub key_id: Arc<str>,
    pub role: Role,
    /// The kinds this key is limited to; `None` is every kind.
    pub kinds: Option<Arc<[String]>>,
}

impl Caller {
    /// Whether the key covers operations of this kind.
    pub fn covers(&self, kind: &str) -> bool {
        self.kinds
            .as_ref()
            .is_none_or(|kinds| kinds.iter().any(|covered| covered == kind))
    }

    /// How history names this caller.
    pub fn actor(&self) -> String {
        format!("key:{}", self.key_id)
    }
}

/// A whole key as its holder sends it. Never printed: `Debug` shows the public half only.
#[derive(Clone)]
pub struct Secret {
    pub tenant: Tenant,
    pub key_id: Box<str>,
    text: Box<str>,
}

impl Secret {
    /// A new random key.
    pub fn generate(tenant: &Tenant) -> Result<Self, getrandom::Error> {
        let key_id = random_base62::<16>()?;
        let secret = random_base62::<43>()?;
        let text = format!("opl_{tenant}_{key_id}_{secret}").into();
        Ok(Self {
            tenant: tenant.clone(),
            key_id: key_id.into(),
            text,
        })
    }

    /// Takes a presented key apart; `None` if it cannot be one of ours.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.strip_prefix("opl_")?.splitn(3, '_');
        let (tenant, key_id, secret) = (parts.next()?, parts.next()?, parts.next()?);
        let base62 = |part: &str, length| part.len() == length && part.bytes().all(|byte| byte.is_ascii_alphanumeric());
        if !base62(key_id, 16) || !base62(secret, 43) {
            return None;
        }
        Some(Self {
            tenant: tenant.parse().ok()?,
            key_id: key_id.into(),
            text: text.into(),
        })
    }

    /// The key itself, to be shown once.
    pub fn reveal(&self) -> &str {
        &self.text
    }

    /// What is stored of it.
    pub fn sha256(&self) -> [u8; 32] {
        Sha256::digest(self.text.as_bytes()).into()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "opl_{}_{}_…", self.tenant, self.key_id)
    }
}

/// A key as lists show it.
#[derive(Debug, Clone)]
pub struct Key {
    pub key_id: String,
    pub role: String,
    pub label: String,
    pub kinds: Option<Vec<String>>,
    pub created_at: OffsetDateTime,
    pub last_used_at: Option<OffsetDateTime>,
    pub revoked_at: Option<OffsetDateTime>,
}

/// What a new key is to be.
#[derive(Debug, Clone)]
pub struct NewKey {
    pub role: Role,
    pub label: String,
    pub kinds: Option<Vec<String>>,
}

/// A change of a key; what is `None` stays as it is.
#[derive(Debug, Clone, Default)]
pub struct Change {
    pub label: Option<String>,
    /// `Some(None)` lifts the limit.
    pub kinds: Option<Option<Vec<String>>>,
}

/// Stores a new key. The secret is known to the caller alone.
pub async fn create(session: &mut Session, secret: &Secret, new: &NewKey) -> Result<Key, Error> {
    sqlx::query_as!(
        Key,
        r#"
        insert into ledger.api_keys (tenant_id, key_id, secret_sha256, role, label, kinds)
        values ($1, $2, $3, $4, $5, $6)
        returning key_id, role, label, kinds, created_at, last_used_at, revoked_at
        "#,
        secret.tenant.as_str(),
        &*secret.key_id,
        &secret.sha256()[..],
        new.role.as_str(),
        new.label,
        new.kinds.as_deref(),
    )
    .fetch_one(&mut *session)
    .await
    .map_err(doing("store the key"))
}

/// The caller behind a presented key; `None` if there is no such key or it is revoked.
pub async fn authenticate(session: &mut Session, secret: &Secret) -> Result<Option<Caller>, Error> {
    let found = sqlx::query!(
        r#"
        select secret_sha256, role, kinds, clock_timestamp() as "now!",
               coalesce(last_used_at < clock_timestamp() - interval '1 minute', true) as "use_is_news!"
        from ledger.api_keys
        where tenant_id = $1 and key_id = $2 and revoked_at is null
        "#,
        secret.tenant.as_str(),
        &*secret.key_id,
    )
    .fetch_optional(&mut *session)
    .await
    .map_err(doing("look the key up"))?;
    let Some(found) = found else { return Ok(None) };
    if !bool::from(found.secret_sha256.as_slice().ct_eq(&secret.sha256())) {
        return Ok(None);
    }
    let Ok(role) = found.role.parse() else { return Ok(None) };
    if found.use_is_news {
        note_use(session, secret, found.now).await?;
    }
    Ok(Some(Caller {
        tenant: secret.tenant.clone(),
        key_id: (*secret.key_id).into(),
        role,
        kinds: found.kinds.map(Into::into),
    }))
}

async fn note_use(session: &mut Session, secret: &Secret, now: OffsetDateTime) -> Result<(), Error> {
    sqlx::query!(
        r#"
        update ledger.api_keys set last_used_at = $3
        where tenant_id = $1 and key_id = $2 and revoked_at is null
        "#,
        secret.tenant.as_str(),
        &*secret.key_id,
        now,
    )
    .execute(&mut *session)
    .await
    .map_err(doing("note the key's use"))?;
    Ok(())
}

/// A tenant's keys after `after` in order of key id, revoked ones included.
pub async fn list(session: &mut Session, tenant: &Tenant, after: &str, limit: i64) -> Result<Vec<Key>, Error> {
    sqlx::query_as!(
        Key,
        r#"
        select key_id, role, label, kinds, created_at, last_used_at, revoked_at
        from ledger.api_keys where tenant_id = $1 and key_id > $2 order by key_id limit $3
        "#,
        tenant.as_str(),
        after,
        limit,
    )
    .fetch_all(&mut *session)
    .await
    .map_err(doing("list the keys"))
}

/// Changes label or kinds; `None` if the tenant has no such key or it is revoked.
pub async fn change(
    session: &mut Session,
    tenant: &Tenant,
    key_id: &str,
    change: &Change,
) -> Result<Option<Key>, Error> {
    let kinds = change.kinds.as_ref().and_then(Option::as_deref);
    sqlx::query_as!(
        Key,
        r#"
        update ledger.api_keys
        set label = coalesce($3, label), kinds = case when $4 then $5 else kinds end
        where tenant_id = $1 and key_id = $2 and revoked_at is null
        returning key_id, role, label, kinds, created_at, last_used_at, revoked_at
        "#,
        tenant.as_str(),
        key_id,
        change.label,
        change.kinds.is_some(),
        kinds,
    )
    .fetch_optional(&mut *session)
    .await
    .map_err(doing("change the key"))
}

/// Revokes a key for good; says whether the tenant has such a key. Revoking twice changes nothing.
pub async fn revoke(session: &mut Session, tenant: &Tenant, key_id: &str) -> Result<bool, Error> {
    let now = sqlx::query_scalar!(r#"select clock_timestamp() as "now!""#)
        .fetch_one(&mut *session)
        .await
        .map_err(doing("read the clock"))?;
    let revoked = sqlx::query!(
        "update ledger.api_keys set revoked_at = coalesce(revoked_at, $3) where tenant_id = $1 and key_id = $2",
        tenant.as_str(),
        key_id,
        now,
    )
    .execute(&mut *session)
    .await
    .map_err(doing("revoke the key"))?;
    Ok(revoked.rows_affected() == 1)
}

/// `LENGTH` uniform base-62 characters; bytes of 248 and more are thrown away so that none is likelier than another.
fn random_base62<const LENGTH: usize>() -> Result<String, getrandom::Error> {
    const DIGITS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    let mut text = String::with_capacity(LENGTH);
    let mut bytes = [0u8; 64];
    while text.len() < LENGTH {
        getrandom::fill(&mut bytes)?;
        let digits = bytes
            .iter()
            .filter(|byte| **byte < 248)
            .map(|byte| DIGITS[usize::from(byte % 62)] as char);
        text.extend(digits.take(LENGTH - text.len()));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_generated_key_parses_back_and_never_prints_its_secret() {
        let secret = Secret::generate(&"acme-2".parse().unwrap()).unwrap();
        let again = Secret::parse(secret.reveal()).unwrap();
        assert_eq!((again.tenant.as_str(), &again.key_id), ("acme-2", &secret.key_id));
        assert_eq!(again.sha256(), secret.sha256());
        let hidden = secret.reveal().rsplit('_').next().unwrap();
        assert!(!format!("{secret:?}").contains(hidden));
    }

    #[test]
    fn what_cannot_be_a_key_is_refused_without_a_look_up() {
        let good = Secret::generate(&"demo".parse().unwrap()).unwrap().reveal().to_owned();
        for bad in [
            "",
            "opl_",
            "opl_demo_x_y",
            &good[1..],
            &format!("{good}x"),
            &good.replace("demo", "Demo"),
        ] {
            assert!(Secret::parse(bad).is_none(), "{bad}");
        }
    }

    #[test]
    fn a_key_without_kinds_covers_all_and_one_with_kinds_covers_those() {
        let mut caller = Caller {
            tenant: "demo".parse().unwrap(),
            key_id: "k".into(),
            role: Role::Agent,
            kinds: None,
        };
        assert!(caller.covers("order.refund"));
        caller.kinds = Some(vec!["account.deposit".to_owned()].into());
        assert!(caller.covers("account.deposit") && !caller.covers("order.refund"));
    }
}
