//! The HTTP header fields of a check: `Retry-After` of RFC 9110, and the fields of
//! draft-ietf-httpapi-ratelimit-headers.

use std::time::Duration;

use super::check::{Check, KeyState, Limited};
use crate::input::whole_seconds;

impl Check {
    /// Returns the header fields `RateLimit-Policy` and `RateLimit`, and `Retry-After` if the call
    /// was limited.
    ///
    /// - `q` is the burst, and `w` the number of seconds in which it refills. N and the period are
    ///   left out, because they would invite a client to send N requests at once.
    /// - `r` is the number of units left, and `t` the number of seconds until all `q` are available
    ///   again if no more are spent.
    /// - After a limited call, `r` is 0, and `t` is the same as `Retry-After`: the number of
    ///   seconds until the units that the call asked for are available.
    ///
    /// Seconds are rounded up, and are at least 1. Bytes of the name that a structured field cannot
    /// hold are percent-encoded.
    ///
    /// ```
    /// # use diesel_interlock::{Quota, RateLimit};
    /// # let database = workbench::Database::new();
    /// # let pool = database.pool(1);
    /// # diesel_interlock::migrations::install(&pool)?;
    /// static API: RateLimit = RateLimit::named("api", Quota::per_minute(3));
    ///
    /// let fields = API.key("customer 7").check(&pool)?.headers();
    /// assert_eq!(fields[0], ("ratelimit-policy", r#""api";q=3;w=60"#.to_owned()));
    /// assert_eq!(fields[1], ("ratelimit", r#""api";r=2;t=20"#.to_owned()));
    /// # Ok::<(), diesel_interlock::Error>(())
    /// ```
    pub fn headers(&self) -> Vec<(&'static str, String)> {
        match self {
            Self::Allowed(spent) => fields(&spent.state, None),
            Self::Limited(limited) => limited.headers(),
        }
    }
}

#[cfg(feature = "http")]
impl Check {
    /// Returns the fields of [`headers`](Self::headers) for a response:
    /// `response.headers_mut().extend(check.header_map())`.
    pub fn header_map(&self) -> http::HeaderMap {
        let field = |(name, value): (&'static str, String)| {
            // Names are constants, and values are printable ASCII.
            let value = http::HeaderValue::try_from(value).ok()?;
            Some((http::HeaderName::from_static(name), value))
        };
        self.headers().into_iter().filter_map(field).collect()
    }
}

impl Limited {
    /// Returns the fields of [`Check::headers`] for a handler that has only the refusal, for
    /// example from a check of several limits.
    pub fn headers(&self) -> Vec<(&'static str, String)> {
        fields(&self.state, Some(self))
    }
}

fn fields(state: &KeyState, limited: Option<&Limited>) -> Vec<(&'static str, String)> {
    let name = string(state.name);
    let quota = state.quota;
    let window = quota
        .period
        .mul_f64(f64::from(quota.burst) / f64::from(quota.units.max(1)));
    let reset = limited.map_or(state.full_in, |limited| limited.retry_after);
    let remaining = if limited.is_some() {
        0
    } else {
        state.remaining
    };
    let mut fields = vec![
        (
            "ratelimit-policy",
            format!("{name};q={};w={}", quota.burst, seconds(window)),
        ),
        (
            "ratelimit",
            format!("{name};r={remaining};t={}", seconds(reset)),
        ),
    ];
    fields.extend(limited.map(|limited| ("retry-after", limited.retry_after_secs().to_string())));
    fields
}

/// Whole seconds, bounded because an integer of a structured field has at most 15 digits.
fn seconds(duration: Duration) -> u64 {
    whole_seconds(duration).min(999_999_999_999_999)
}

/// Quotes a text as a string of a structured field, which may contain only printable ASCII.
fn string(text: &str) -> String {
    let mut quoted = String::from("\"");
    for byte in text.bytes() {
        match byte {
            b'"' | b'\\' => quoted.extend(['\\', byte.into()]),
            b' '..=b'~' => quoted.push(byte.into()),
            _ => quoted.push_str(&format!("%{byte:02X}")),
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_quoted_and_ascii() {
        assert_eq!(string("a \"b\" \\ ü\n"), r#""a \"b\" \\ %C3%BC%0A""#);
    }

    /// So each of them is in the map, too.
    #[test]
    #[cfg(feature = "http")]
    fn every_name_makes_a_field() {
        for name in [
            "api",
            "a \"b\" \\ \u{fc}\n\u{7f}",
            "\u{0}",
            &"x".repeat(1000),
        ] {
            let value = http::HeaderValue::try_from(string(name));
            assert!(value.is_ok(), "{name:?}");
        }
    }

    #[test]
    fn seconds_are_rounded_up() {
        assert_eq!(seconds(Duration::from_millis(1001)), 2);
        assert_eq!(seconds(Duration::MAX), 999_999_999_999_999);
    }
}
