//! The rate limit of each client, over all instances.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use diesel_interlock::{Check, Error, RateLimit, Spent};

use crate::config::Config;
use crate::error::AppError;

/// The name of the limit.
pub const NAME: &str = "api";

/// The header field in which a client sends its key.
pub const API_KEY: &str = "x-api-key";

/// The client of all requests without a key whose address is unknown.
const ANONYMOUS: &str = "anonymous";

/// A client, as the limit and the operators know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Client(String);

impl Client {
    /// Returns the client that sent a request: by its API key, else by its address.
    ///
    /// This application has no accounts. Use a key that was authenticated, because a client that makes up keys has the whole
    /// quota for each of them.
    pub fn of(api_key: Option<&[u8]>, peer: Option<IpAddr>) -> Result<Self, AppError> {
        // The prefix separates the two, so that no client can send the address of another as its key.
        match (api_key, peer) {
            (Some(key), _) => match std::str::from_utf8(key) {
                Ok(key) if is_api_key(key) => Ok(Self(format!("key:{key}"))),
                _ => Err(AppError::Invalid(format!(
                    "{API_KEY} must have 1 to 200 visible characters of ASCII"
                ))),
            },
            (None, Some(peer)) => Ok(Self(format!("address:{}", peer.to_canonical()))),
            (None, None) => Ok(Self(ANONYMOUS.to_owned())),
        }
    }

    /// Whether a text is a client as this module writes it.
    pub(crate) fn is_one(text: &str) -> bool {
        match text.split_once(':') {
            Some(("key", key)) => is_api_key(key),
            Some(("address", address)) => address.parse::<IpAddr>().is_ok(),
            _ => text == ANONYMOUS,
        }
    }
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn is_api_key(key: &str) -> bool {
    (1..=200).contains(&key.len()) && key.bytes().all(|byte| byte.is_ascii_graphic())
}

/// What happens to a request while the database is away, so that its limit cannot be checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WhenAway {
    Pass,
    Refuse,
}

/// A setting that is neither of the two.
#[derive(Debug, thiserror::Error)]
#[error("must be pass or refuse")]
pub struct NeitherPassNorRefuse;

impl FromStr for WhenAway {
    type Err = NeitherPassNorRefuse;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "pass" => Ok(Self::Pass),
            "refuse" => Ok(Self::Refuse),
            _ => Err(NeitherPassNorRefuse),
        }
    }
}

/// An application that checks the limit of a client.
pub trait Limiting: Clone + Send + Sync + 'static {
    /// Spends a unit of the client. Returns `None` if the request passes although the limit could not be checked.
    fn spend(&self, client: Client)
    -> impl Future<Output = Result<Option<Spent>, AppError>> + Send;
}

/// The limit of a client.
pub(crate) fn of(client: &Client, config: &Config) -> RateLimit {
    RateLimit::named(NAME, config.api_limit).key(client)
}

/// What a check means for its request.
pub(crate) fn decide(
    check: Result<Check, Error>,
    when_away: WhenAway,
) -> Result<Option<Spent>, AppError> {
    match check {
        Ok(Check::Allowed(spent)) => Ok(Some(spent)),
        Ok(Check::Limited(limited)) => Err(AppError::Limited(limited)),
        Err(error) if is_away(&error) => {
            let cause = &error as &dyn std::error::Error;
            tracing::warn!(error = cause, ?when_away, "a limit could not be checked");
            match when_away {
                WhenAway::Pass => Ok(None),
                WhenAway::Refuse => Err(AppError::NotChecked(error)),
            }
        }
        Err(error) => Err(error.into()),
    }
}

/// Whether the database is away, or a standby that no writes reach. Other errors are mistakes of the program.
fn is_away(error: &Error) -> bool {
    matches!(error, Error::Pool(_) | Error::Database(_) | Error::ReadOnly)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_is_known_by_its_key_or_its_address() {
        let peer = |text: &str| text.parse().ok();
        let longest = "k".repeat(200);
        for (api_key, peer, expected) in [
            (Some("a"), peer("192.0.2.1"), Some("key:a")),
            (
                Some("address:192.0.2.1"),
                None,
                Some("key:address:192.0.2.1"),
            ),
            (Some(&*longest), None, Some(&*format!("key:{longest}"))),
            (None, peer("192.0.2.1"), Some("address:192.0.2.1")),
            (None, peer("::ffff:192.0.2.1"), Some("address:192.0.2.1")),
            (None, peer("2001:db8::1"), Some("address:2001:db8::1")),
            (None, None, Some("anonymous")),
            (Some(""), peer("192.0.2.1"), None),
            (Some("a b"), None, None),
            (Some("é"), None, None),
            (Some(&*"k".repeat(201)), None, None),
        ] {
            let client = Client::of(api_key.map(str::as_bytes), peer);
            let client = client.ok().map(|client| client.to_string());
            assert_eq!(client.as_deref(), expected, "{api_key:?} {peer:?}");
            assert!(client.is_none_or(|client| Client::is_one(&client)));
        }
        assert!(Client::of(Some(b"\xff"), None).is_err());
    }

    #[test]
    fn other_texts_are_no_clients() {
        for text in [
            "",
            "a",
            "key:",
            "key:a b",
            "address:",
            "address:a",
            "Anonymous",
            "*",
        ] {
            assert!(!Client::is_one(text), "{text}");
        }
    }

    #[test]
    fn only_two_words_say_what_happens_while_the_database_is_away() {
        assert_eq!("pass".parse::<WhenAway>().ok(), Some(WhenAway::Pass));
        assert_eq!("refuse".parse::<WhenAway>().ok(), Some(WhenAway::Refuse));
        for other in ["", "Pass", "true"] {
            assert!(other.parse::<WhenAway>().is_err(), "{other}");
        }
    }
}
