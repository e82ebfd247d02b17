//! The HTTP header fields of rate limits.

use std::fmt::Write;

use super::Quota;
use crate::time;
use std::time::Duration;

/// The largest integer of a structured field (RFC 9651).
const LARGEST: u128 = 999_999_999_999_999;

/// The values of the HTTP header fields that tell a client its rate limit, as plain strings.
///
/// The fields are those of [draft-ietf-httpapi-ratelimit-headers][draft], with `Retry-After` where a call was limited. For 100
/// per minute with a burst of 20, of which 17 are left:
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
///   `t` equals `Retry-After`.
/// - The name is a string of printable ASCII. Other bytes of it are percent-encoded.
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

    /// Joins the fields of several limits into one of each, and keeps the longest `Retry-After`.
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

/// What the fields tell.
#[derive(Debug, Clone, Copy)]
pub(super) struct Told<'a> {
    pub(super) name: &'a str,
    pub(super) partition_key: Option<&'a [u8]>,
    pub(super) quota: Quota,
    pub(super) remaining: u32,
    /// How long until the key is full.
    pub(super) full_in: Duration,
    /// If the call was limited, when it may be repeated, unless it never may.
    pub(super) limited: Option<Option<Duration>>,
}

impl Told<'_> {
    pub(super) fn headers(self) -> Headers {
        let Quota { burst, .. } = self.quota;
        let retry_after = self.limited.flatten().map(time::whole_seconds);
        let (r, t) = match retry_after {
            // What is refilled until then may be less than what is left.
            Some(seconds) => {
                let seconds = u128::from(seconds);
                let refilled =
                    seconds * 1_000_000 * u128::from(self.quota.n) / self.quota.period_us().max(1);
                (refilled.min(self.remaining.into()), seconds)
            }
            None => (self.remaining.into(), self.seconds_of_the_rest()),
        };
        let mut policy = self.identifier();
        let mut limit = policy.clone();
        let _ = write!(policy, ";q={burst}");
        let window = self.quota.time_of(burst);
        if window >= 1_000_000 {
            let _ = write!(policy, ";w={}", window.div_ceil(1_000_000).min(LARGEST));
        }
        let _ = write!(limit, ";r={r};t={}", t.min(LARGEST));
        if let Some(key) = self.partition_key {
            let key = base64(key);
            let _ = write!(policy, ";pk=:{key}:");
            let _ = write!(limit, ";pk=:{key}:");
        }
        Headers {
            policy,
            limit,
            retry_after: retry_after.map(|seconds| u128::from(seconds).min(LARGEST).to_string()),
        }
    }

    /// The whole seconds in which the quota refills what is left, or until it has refilled a unit if nothing is.
    fn seconds_of_the_rest(self) -> u128 {
        let time = match self.remaining {
            0 => {
                let room = self.quota.room_for(1).unwrap_or(0);
                self.full_in.as_micros().saturating_sub(room)
            }
            rest => self.quota.time_of(rest),
        };
        time.div_ceil(1_000_000).max(1)
    }

    /// The name as a string of a structured field.
    fn identifier(self) -> String {
        let mut quoted = String::from('"');
        for byte in self.name.bytes() {
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
}

/// Encodes bytes as a byte sequence of a structured field does.
fn base64(bytes: &[u8]) -> String {
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
