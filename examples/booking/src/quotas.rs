//! How near the clients are to their limit, and the quotas that operators set: what the page at `/admin/limits` shows and
//! changes.
//!
//! The modules `blocking` and `asynchronous` read with the queries of this one. `Quotas::of` makes of it what the page shows.

use std::fmt;
use std::num::NonZeroU32;
use std::time::Duration;

use diesel::data_types::PgInterval;
use diesel::dsl::{AsSelect, auto_type};
use diesel::pg::Pg;
use diesel::prelude::*;
use diesel_interlock::monitor::{self, RateLimitOverride, RateLimitRow};
use diesel_interlock::schema::resource_control::{rate_limit, rate_limit_override};
use diesel_interlock::{Quota, RateLimitState};
use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::error::AppError;
use crate::limits::{self, Client};
use crate::status::Span;

/// How many clients and how many quotas of operators the page shows.
const SHOWN: i64 = 50;

/// The longest period, in seconds: 366 days.
const LONGEST_PERIOD: u32 = 366 * 24 * 60 * 60;

/// The longest time in which a burst is refilled, in seconds: 36,600 days.
const LONGEST_REFILL: u64 = 100 * LONGEST_PERIOD as u64;

/// What is left for one client.
#[derive(Debug, Serialize)]
pub struct Left {
    client: String,
    remaining: u32,
    burst: u32,
    n: u32,
    period_secs: Span,
    full_in_secs: Span,
}

impl Left {
    pub(crate) fn of(client: &Client, state: RateLimitState) -> Self {
        Self {
            client: client.to_string(),
            remaining: state.remaining,
            burst: state.quota.burst,
            n: state.quota.n,
            period_secs: Span(state.quota.period),
            full_in_secs: Span(state.full_in),
        }
    }
}

/// What the page shows.
#[derive(Debug)]
pub struct Quotas {
    pub instance: String,
    /// The quota of the program.
    pub own: Terms,
    /// Those nearest to their limit first.
    pub clients: Vec<Usage>,
    pub overrides: Vec<Override>,
}

/// A quota in words.
#[derive(Debug, Clone, Copy)]
pub struct Terms {
    n: i64,
    period: Duration,
    burst: i64,
}

/// How near a client is to its limit.
#[derive(Debug)]
pub struct Usage {
    pub client: String,
    owed: i64,
    pub terms: Terms,
}

/// A quota that an operator set.
#[derive(Debug)]
pub struct Override {
    /// `None` for all clients.
    pub client: Option<String>,
    pub terms: Terms,
}

/// What was read.
#[derive(Debug)]
pub struct Seen {
    pub(crate) overrides: Vec<RateLimitOverride>,
    /// The clients that owe most, with what they owe.
    pub(crate) most: Vec<(RateLimitRow, i64)>,
    /// The clients with quotas of their own, which may be near to a small one.
    pub(crate) overridden: Vec<(RateLimitRow, i64)>,
}

/// The quotas that operators set, that of all clients first.
#[auto_type]
pub(crate) fn overrides() -> _ {
    let selection: AsSelect<RateLimitOverride, Pg> = RateLimitOverride::as_select();
    let name: &'static str = limits::NAME;
    let most: i64 = SHOWN;
    rate_limit_override::table
        .filter(rate_limit_override::name.eq(name))
        .order(rate_limit_override::scope)
        .limit(most)
        .select(selection)
}

/// The clients that owe most units.
#[auto_type]
pub(crate) fn spent() -> _ {
    let selection: (AsSelect<RateLimitRow, Pg>, monitor::units_owed) =
        (RateLimitRow::as_select(), monitor::units_owed());
    let name: &'static str = limits::NAME;
    let most: i64 = SHOWN;
    monitor::spent_keys()
        .filter(rate_limit::name.eq(name))
        .limit(most)
        .select(selection)
}

/// Those of the clients with quotas of their own that owe units.
#[auto_type]
pub(crate) fn spent_by(clients: Vec<String>) -> _ {
    spent().filter(rate_limit::key.eq_any(clients))
}

/// The clients with quotas of their own.
pub(crate) fn clients_of(overrides: &[RateLimitOverride]) -> Vec<String> {
    overrides.iter().filter_map(|it| it.key.clone()).collect()
}

impl Quotas {
    /// Sorts what was seen for the reader.
    pub(crate) fn of(config: &Config, seen: Seen) -> Self {
        let own = Terms::from(config.api_limit);
        let overrides: Vec<_> = seen.overrides.iter().map(Override::of).collect();
        let terms_of = |client: Option<&str>| {
            let mut of_client = overrides.iter().filter(|it| it.client.as_deref() == client);
            of_client.next().map(|it| it.terms)
        };
        let of_all = terms_of(None).unwrap_or(own);
        let (most, overridden) = (seen.most.into_iter(), seen.overridden.into_iter());
        let mut clients: Vec<_> = most
            .filter(|(row, _)| terms_of(Some(&row.key)).is_none())
            .chain(overridden)
            .map(|(row, owed)| Usage {
                terms: terms_of(Some(&row.key)).unwrap_or(of_all),
                client: row.key,
                owed,
            })
            .collect();
        // By the part of the burst that is used, without a division.
        clients.sort_by_key(|it| it.client.clone());
        clients.sort_by(|one, other| {
            let of_other = i128::from(other.owed) * i128::from(one.terms.burst);
            of_other.cmp(&(i128::from(one.owed) * i128::from(other.terms.burst)))
        });
        clients.truncate(SHOWN as usize);
        Self {
            instance: config.instance.clone(),
            own,
            clients,
            overrides,
        }
    }
}

impl Usage {
    /// How many units are left.
    pub fn remaining(&self) -> i64 {
        (self.terms.burst - self.owed).max(0)
    }

    /// Whether the next request is refused.
    pub fn is_limited(&self) -> bool {
        self.remaining() == 0
    }

    /// How long until the client has its whole burst again.
    pub fn full_in(&self) -> Span {
        let periods = self.owed as f64 / self.terms.n as f64;
        let seconds = periods * self.terms.period.as_secs_f64();
        Span(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
    }
}

impl Override {
    fn of(row: &RateLimitOverride) -> Self {
        Self {
            client: row.key.clone(),
            terms: Terms {
                n: row.n,
                period: row.period,
                burst: row.burst,
            },
        }
    }
}

impl From<Quota> for Terms {
    fn from(quota: Quota) -> Self {
        Self {
            n: quota.n.into(),
            period: quota.period,
            burst: quota.burst.into(),
        }
    }
}

impl Terms {
    pub fn burst(&self) -> i64 {
        self.burst
    }
}

impl fmt::Display for Terms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { n, period, burst } = self;
        write!(f, "{n} per {}, {burst} at once", Span(*period))
    }
}

/// What the form of the page sends. A field of a form that is empty is sent as an empty text.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Form {
    action: String,
    #[serde(default)]
    client: String,
    #[serde(default)]
    n: String,
    #[serde(default)]
    period_secs: String,
    #[serde(default)]
    burst: String,
}

/// What an operator wants.
#[derive(Debug, PartialEq)]
pub(crate) enum Change {
    Set(NewOverride),
    Delete {
        /// The `scope` of the row.
        scope: String,
    },
}

/// A quota to insert, or to update.
#[derive(Debug, PartialEq, Insertable, AsChangeset)]
#[diesel(table_name = rate_limit_override, primary_key(name, key))]
pub(crate) struct NewOverride {
    name: &'static str,
    key: Option<String>,
    n: i64,
    period: PgInterval,
    burst: i64,
}

impl Form {
    /// Checks what the form says. The database has constraints with the same limits.
    pub(crate) fn checked(&self) -> Result<Change, AppError> {
        let client = match self.client.trim() {
            "" => None,
            client if Client::is_one(client) => Some(client.to_owned()),
            _ => {
                return Err(AppError::Invalid(
                    "client must be anonymous, begin with key: or address:, or be empty for all clients".to_owned(),
                ));
            }
        };
        match self.action.as_str() {
            "set" => {}
            "delete" => {
                let scope = client.map_or_else(|| "*".to_owned(), |client| format!("={client}"));
                return Ok(Change::Delete { scope });
            }
            _ => {
                let message = "action must be set or delete".to_owned();
                return Err(AppError::Invalid(message));
            }
        }
        let n = number("n", &self.n, u32::MAX)?;
        let period = number("period_secs", &self.period_secs, LONGEST_PERIOD)?;
        let burst = match self.burst.trim() {
            "" => n,
            burst => number("burst", burst, u32::MAX)?,
        };
        if u64::from(burst) * u64::from(period) > u64::from(n).saturating_mul(LONGEST_REFILL) {
            return Err(AppError::Invalid(
                "the burst must be refilled within 36600 days".to_owned(),
            ));
        }
        Ok(Change::Set(NewOverride {
            name: limits::NAME,
            key: client,
            n: n.into(),
            // Not in days, which are not all of one length.
            period: PgInterval::from_microseconds(i64::from(period) * 1_000_000),
            burst: burst.into(),
        }))
    }
}

fn number(field: &str, text: &str, most: u32) -> Result<u32, AppError> {
    let number = text.trim().parse::<NonZeroU32>().map(NonZeroU32::get);
    number
        .ok()
        .filter(|number| *number <= most)
        .ok_or_else(|| AppError::Invalid(format!("{field} must be a number from 1 to {most}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form(action: &str, client: &str, n: &str, period_secs: &str, burst: &str) -> Form {
        let [action, client, n, period_secs, burst] =
            [action, client, n, period_secs, burst].map(str::to_owned);
        Form {
            action,
            client,
            n,
            period_secs,
            burst,
        }
    }

    #[test]
    fn a_form_is_a_change_or_says_what_is_wrong_with_it() {
        let set = |key: Option<&str>, n, period, burst| {
            Some(Change::Set(NewOverride {
                name: "api",
                key: key.map(str::to_owned),
                n,
                period: PgInterval::from_microseconds(period),
                burst,
            }))
        };
        let delete = |scope: &str| {
            Some(Change::Delete {
                scope: scope.to_owned(),
            })
        };
        for (form, expected) in [
            (
                form("set", "key:a", "9", "60", ""),
                set(Some("key:a"), 9, 60_000_000, 9),
            ),
            (
                form("set", " key:a ", " 9 ", " 60 ", " 3 "),
                set(Some("key:a"), 9, 60_000_000, 3),
            ),
            (
                form("set", "", "4294967295", "31622400", "4294967295"),
                set(None, 4_294_967_295, 31_622_400_000_000, 4_294_967_295),
            ),
            (
                form("set", "anonymous", "1", "31622400", "100"),
                set(Some("anonymous"), 1, 31_622_400_000_000, 100),
            ),
            (form("set", "anonymous", "1", "31622400", "101"), None),
            (form("set", "key:a", "0", "60", ""), None),
            (form("set", "key:a", "4294967296", "60", ""), None),
            (form("set", "key:a", "-1", "60", ""), None),
            (form("set", "key:a", "1.5", "60", ""), None),
            (form("set", "key:a", "", "60", ""), None),
            (form("set", "key:a", "9", "0", ""), None),
            (form("set", "key:a", "9", "31622401", ""), None),
            (form("set", "key:a", "9", "", ""), None),
            (form("set", "key:a", "9", "60", "0"), None),
            (form("set", "a", "9", "60", ""), None),
            (form("set", "key:", "9", "60", ""), None),
            (form("set", "key:a\0", "9", "60", ""), None),
            (form("delete", "key:a", "", "", ""), delete("=key:a")),
            (form("delete", "", "", "", ""), delete("*")),
            (form("delete", "*", "", "", ""), None),
            (form("reset", "key:a", "9", "60", ""), None),
            (form("", "", "", "", ""), None),
        ] {
            let change = form.checked();
            let is_told = matches!(&change, Ok(_) | Err(AppError::Invalid(_)));
            assert!(is_told, "{form:?}: {change:?}");
            assert_eq!(change.ok(), expected, "{form:?}");
        }
    }

    #[test]
    fn a_client_is_as_near_to_its_limit_as_the_quota_in_force_says() {
        let terms = |n, seconds, burst| Terms {
            n,
            period: Duration::from_secs(seconds),
            burst,
        };
        for (owed, terms, remaining, is_limited, full_in) in [
            (0, terms(60, 60, 20), 20, false, "0.0 s"),
            (5, terms(60, 60, 20), 15, false, "5.0 s"),
            (20, terms(60, 60, 20), 0, true, "20 s"),
            // With reservations, or after the quota was lowered.
            (30, terms(60, 60, 20), 0, true, "30 s"),
        ] {
            let usage = Usage {
                client: String::new(),
                owed,
                terms,
            };
            assert_eq!(usage.remaining(), remaining, "{usage:?}");
            assert_eq!(usage.is_limited(), is_limited, "{usage:?}");
            assert_eq!(usage.full_in().to_string(), full_in, "{usage:?}");
        }
    }
}
