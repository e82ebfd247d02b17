//! The HTTP header fields that rate limits and semaphores tell their clients.

use std::fmt::Write;

/// The largest integer of a structured field (RFC 9651).
pub(crate) const LARGEST: u128 = 999_999_999_999_999;

/// The values of the HTTP header fields that tell a client its rate limit, or that a semaphore is full, as plain strings.
///
/// The fields are those of [draft-ietf-httpapi-ratelimit-headers][draft], with `Retry-After` where a call was limited.
///
/// # Rate limits
///
/// For 100 per minute with a burst of 20, of which 17 are left:
///
/// ```text
/// RateLimit-Policy: "api";q=20;w=12
/// RateLimit: "api";r=17;t=11
/// ```
///
/// - `q` is the burst, and `w` the whole seconds in which it is refilled, because `q=100;w=60` would invite a client to send
///   100 requests at once. There is no `w` if the burst is refilled within a second.
/// - `r` is the number of units that are left, and `t` the whole seconds in which as many are refilled, so a client that spends
///   `r` in each `t` seconds is never limited. If nothing is left, `t` is the time until a unit is. If the call was limited,
///   `t` equals `Retry-After`, and `r` is at most what is refilled in `t`.
///
/// # Semaphores
///
/// For a semaphore of 4 slots, all of which are taken, and the first of which expires in 9 seconds:
///
/// ```text
/// RateLimit-Policy: "geocoder";q=4;qu="concurrent-requests"
/// RateLimit: "geocoder";r=0;t=9
/// Retry-After: 9
/// ```
///
/// - `q` is the number of slots, and `qu` the unit of the quota.
/// - `r` is 0, because no slot is free. `t` equals `Retry-After`.
///
/// # Names
///
/// The name is a string of printable ASCII. Other bytes of it are percent-encoded.
///
/// [draft]: https://datatracker.ietf.org/doc/draft-ietf-httpapi-ratelimit-headers/
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Headers {
    /// The value of `RateLimit-Policy`.
    pub policy: String,
    /// The value of `RateLimit`.
    pub limit: String,
    /// The value of `Retry-After`, in seconds. `None` if the call was allowed, or would always be limited.
    pub retry_after: Option<String>,
}

impl Headers {
    /// Returns the names and values of the fields.
    pub fn fields(&self) -> impl Iterator<Item = (&'static str, &str)> {
        [
            ("RateLimit-Policy", Some(&self.policy)),
            ("RateLimit", Some(&self.limit)),
            ("Retry-After", self.retry_after.as_ref()),
        ]
        .into_iter()
        .filter_map(|(name, value)| Some((name, value?.as_str())))
    }

    /// Joins the fields of several limits into one of each, and keeps the longest `Retry-After`. One that never allows the call
    /// has none, so look for [`AboveBurst`](crate::LimitedReason::AboveBurst) yourself.
    pub fn joined(all: impl IntoIterator<Item = Headers>) -> Option<Self> {
        all.into_iter().reduce(|mut joined, next| {
            joined.policy += ", ";
            joined.policy += &next.policy;
            joined.limit += ", ";
            joined.limit += &next.limit;
            let seconds =
                |value: &Option<String>| value.as_ref().and_then(|it| it.parse::<u64>().ok());
            if seconds(&next.retry_after) > seconds(&joined.retry_after) {
                joined.retry_after = next.retry_after;
            }
            joined
        })
    }
}

/// Writes a name as a string of a structured field.
pub(crate) fn string(name: &str) -> String {
    let mut quoted = String::from('"');
    for byte in name.bytes() {
        match byte {
            b'"' | b'\\' => {
                quoted.push('\\');
                quoted.push(byte.into());
            }
            b' '..=b'~' => quoted.push(byte.into()),
            other => {
                let _ = write!(quoted, "%{other:02X}");
            }
        }
    }
    quoted.push('"');
    quoted
}

/// Encodes bytes as a byte sequence of a structured field does.
pub(crate) fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let three = [
            chunk[0],
            chunk.get(1).copied().unwrap_or(0),
            chunk.get(2).copied().unwrap_or(0),
        ];
        let number = u32::from_be_bytes([0, three[0], three[1], three[2]]);
        for place in 0..4 {
            let sextet = (number >> (18 - 6 * place)) & 63;
            let is_padding = place > chunk.len();
            text.push(if is_padding {
                '='
            } else {
                ALPHABET[sextet as usize].into()
            });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(name: &str, retry_after: Option<&str>) -> Headers {
        Headers {
            policy: format!("{};q=1", string(name)),
            limit: format!("{};r=0", string(name)),
            retry_after: retry_after.map(str::to_owned),
        }
    }

    #[test]
    fn a_name_becomes_printable_ascii_in_quotes() {
        for (name, expected) in [
            ("", r#""""#),
            ("api", r#""api""#),
            (r#"a"b\c"#, r#""a\"b\\c""#),
            ("a b~", r#""a b~""#),
            ("\u{1f}\u{7f}", r#""%1F%7F""#),
            ("é", r#""%C3%A9""#),
        ] {
            assert_eq!(string(name), expected, "{name:?}");
        }
    }

    #[test]
    fn bytes_become_base64_with_padding() {
        for (bytes, expected) in [
            (&b""[..], ""),
            (b"f", "Zg=="),
            (b"fo", "Zm8="),
            (b"foo", "Zm9v"),
            (b"foob", "Zm9vYg=="),
            (&[0xff, 0xef, 0xfe], "/+/+"),
        ] {
            assert_eq!(base64(bytes), expected, "{bytes:?}");
        }
    }

    #[test]
    fn the_longest_retry_after_of_several_limits_counts() {
        for (one, other, expected) in [
            (None, None, None),
            (Some("9"), None, Some("9")),
            (None, Some("9"), Some("9")),
            (Some("9"), Some("10"), Some("10")),
            (Some("10"), Some("9"), Some("10")),
        ] {
            let joined = Headers::joined([headers("a", one), headers("b", other)]).unwrap();
            assert_eq!(joined.policy, r#""a";q=1, "b";q=1"#);
            assert_eq!(joined.limit, r#""a";r=0, "b";r=0"#);
            assert_eq!(joined.retry_after.as_deref(), expected);
            assert_eq!(joined.fields().count(), 2 + usize::from(expected.is_some()));
        }
        assert_eq!(Headers::joined([]), None);
    }
}
