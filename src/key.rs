//! Keys of advisory locks: names or numbers, and what PostgreSQL locks for them.

use std::borrow::Cow;
use std::fmt;
use std::hash::{Hash, Hasher};

use crate::error::{Error, Result};
use crate::input;

/// How much of a name `Debug` and `Display` show.
const SHOWN: usize = 80;

/// The key of an advisory lock: a name, a number or a pair of numbers.
///
/// PostgreSQL's advisory locks have no names: PostgreSQL locks a `bigint`, or a pair of `int`, in
/// two separate key spaces of each database. A `LockKey` is such a number, or a name that is hashed
/// to one. Two keys are equal if their numbers are equal, even if their names are not.
///
/// ```
/// use diesel_interlock::LockKey;
///
/// let booking = LockKey::parts(["server", "223", "345"]); // data centre, server
/// assert_eq!(booking, LockKey::named("server 223 345"));
/// assert_eq!(LockKey::named("223 345"), LockKey::bigint(3755351481708176604));
/// assert_ne!(LockKey::pair(0, 1), LockKey::bigint(1));
/// ```
///
/// # The hash of a name
///
/// The number of a name is the 64-bit [FNV-1a](http://www.isthe.com/chongo/tech/comp/fnv/) hash of
/// its UTF-8 bytes, read as a signed number. In SQL, `resource_control.lock_key(text)` returns the
/// same number. The hash never changes, because otherwise an old and a new instance of a program
/// could hold the same lock at once. Two names with the same number exclude each other needlessly.
/// Among a million names, such a pair exists with a probability of 1 in 37 million.
///
/// # Errors
///
/// A name that is empty, longer than 1,000 bytes or contains NUL is refused by the first operation
/// that uses the key ([`Error::Input`]). With the rules of other programs, such as
/// [`crc32`](Self::crc32), only an empty name is refused.
///
/// # Names that clients choose
///
/// FNV-1a is not a cryptographic hash: for any name, another name with the same number is found in
/// seconds. So a client that chooses a part of a name or a key can make another lock busy, although
/// it can never get past that lock. Names that are constants of a program are safe. If clients
/// choose a part, hash it, for example with SHA-256, before you put it into a name or a key.
#[derive(Clone)]
pub struct LockKey {
    name: Option<Cow<'static, str>>,
    number: Number,
}

#[derive(Debug, Clone, Copy)]
enum Number {
    /// FNV-1a of the name. It is computed when it is needed, because `named` is `const` and the
    /// hasher is not.
    OfName,
    Given(LockId),
    /// None: a key was added to a number or to several locks, which is refused.
    None,
}

/// What PostgreSQL locks: a number in either of its two key spaces.
///
/// Ids are ordered. Programs that take several locks in this order do not deadlock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LockId {
    /// One number of 64 bits, as in `pg_advisory_lock(bigint)`.
    BigInt(i64),
    /// Two numbers of 32 bits, as in `pg_advisory_lock(int, int)`.
    Pair(i32, i32),
}

impl LockKey {
    /// Makes the key of a name, by the [hash of the name](Self#the-hash-of-a-name).
    pub const fn named(name: &'static str) -> Self {
        Self {
            name: Some(Cow::Borrowed(name)),
            number: Number::OfName,
        }
    }

    /// Makes the key of a name that has several parts, such as a table and an id.
    ///
    /// The parts are joined by a space. In each part `\` becomes `\\` and a space becomes `\ `, so
    /// different lists of parts have different names. Begin with what the key is for, because all
    /// programs on a database share its keys.
    ///
    /// ```
    /// use diesel_interlock::LockKey;
    ///
    /// assert_eq!(LockKey::parts(["tenant", "7"]), LockKey::named("tenant 7"));
    /// assert_eq!(LockKey::parts(["tenant 7"]), LockKey::named(r"tenant\ 7"));
    /// ```
    pub fn parts<T: fmt::Display>(parts: impl IntoIterator<Item = T>) -> Self {
        Self::from(input::join(parts))
    }

    /// Makes the key of a number, in the key space of `bigint`.
    pub const fn bigint(number: i64) -> Self {
        Self {
            name: None,
            number: Number::Given(LockId::BigInt(number)),
        }
    }

    /// Makes the key of a pair of numbers, in the key space of `(int, int)`.
    pub const fn pair(first: i32, second: i32) -> Self {
        Self {
            name: None,
            number: Number::Given(LockId::Pair(first, second)),
        }
    }

    /// Makes the key that Ruby computes with `Zlib.crc32(name)` and Python with
    /// `zlib.crc32(name.encode())`, as a `bigint`.
    ///
    /// ```
    /// # use diesel_interlock::LockKey;
    /// assert_eq!(LockKey::crc32("223 345"), LockKey::bigint(1713753302));
    /// ```
    pub fn crc32(name: &str) -> Self {
        Self::foreign(
            name,
            LockId::BigInt(crc32fast::hash(name.as_bytes()).into()),
        )
    }

    /// Makes the key of the hash that JavaScript programs commonly use, as a `bigint`:
    /// `hash = (hash << 5) - hash + charCodeAt(i) | 0`. Java's `String.hashCode` is the same.
    ///
    /// ```
    /// # use diesel_interlock::LockKey;
    /// assert_eq!(LockKey::times31("myKey"), LockKey::bigint(104343827));
    /// ```
    pub fn times31(name: &str) -> Self {
        let hash = name.encode_utf16().fold(0_i32, |hash, unit| {
            hash.wrapping_mul(31).wrapping_add(unit.into())
        });
        Self::foreign(name, LockId::BigInt(hash.into()))
    }

    /// Makes the key that the Ruby gem
    /// [`with_advisory_lock`](https://github.com/ClosureTree/with_advisory_lock) locks from its
    /// version 2 on: the pair of the name's CRC-32 without its highest bit, and 0.
    pub fn with_advisory_lock(name: &str) -> Self {
        let hash = crc32fast::hash(name.as_bytes()) as i32 & i32::MAX;
        Self::foreign(name, LockId::Pair(hash, 0))
    }

    /// The key of nothing, which is refused.
    pub(crate) const fn none() -> Self {
        Self {
            name: None,
            number: Number::None,
        }
    }

    fn foreign(name: &str, id: LockId) -> Self {
        Self {
            name: Some(Cow::Owned(name.to_owned())),
            number: Number::Given(id),
        }
    }

    /// Returns the number that PostgreSQL locks, unless the name is invalid.
    pub fn id(&self) -> Result<LockId> {
        match (self.number, &self.name) {
            (Number::None, _) => Err(Error::input(
                "`key` needs a lock with a name, not one of a number, a pair or several",
            )),
            (Number::OfName, Some(name)) => input::name(name).map(|()| self.number()),
            // The rule of another program, which may allow longer names.
            (Number::Given(_), Some(name)) if name.is_empty() => {
                input::name(name).map(|()| self.number())
            }
            _ => Ok(self.number()),
        }
    }

    /// Returns the name that the key was made from, if there was one.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// The name if it is a constant of the program, so that it can be a label of events.
    pub(crate) const fn label(&self) -> &'static str {
        match &self.name {
            Some(Cow::Borrowed(name)) => name,
            _ => "",
        }
    }

    /// The key of one thing under the name of this key.
    pub(crate) fn with_key(&self, key: impl fmt::Display) -> Self {
        match (self.number, &self.name) {
            (Number::OfName, Some(name)) if !name.is_empty() => {
                Self::from(input::with_key(&[name], &input::show(key)))
            }
            (Number::OfName, _) => self.clone(),
            _ => Self::none(),
        }
    }

    fn number(&self) -> LockId {
        match (self.number, &self.name) {
            (Number::Given(id), _) => id,
            (_, name) => LockId::BigInt(fnv1a(name.as_deref().unwrap_or_default())),
        }
    }
}

/// 64-bit FNV-1a of the UTF-8 bytes, as a signed number.
pub(crate) fn fnv1a(name: &str) -> i64 {
    let mut hasher = fnv::FnvHasher::default();
    hasher.write(name.as_bytes());
    hasher.finish() as i64
}

impl From<&'static str> for LockKey {
    fn from(name: &'static str) -> Self {
        Self::named(name)
    }
}

impl From<i64> for LockKey {
    fn from(number: i64) -> Self {
        Self::bigint(number)
    }
}

impl From<LockId> for LockKey {
    fn from(id: LockId) -> Self {
        Self {
            name: None,
            number: Number::Given(id),
        }
    }
}

impl From<(i32, i32)> for LockKey {
    fn from((first, second): (i32, i32)) -> Self {
        Self::pair(first, second)
    }
}

/// Takes the name as it is, without the escaping of [`parts`](LockKey::parts).
impl From<String> for LockKey {
    fn from(name: String) -> Self {
        Self {
            name: Some(Cow::Owned(name)),
            number: Number::OfName,
        }
    }
}

impl PartialEq for LockKey {
    fn eq(&self, other: &Self) -> bool {
        self.number() == other.number()
    }
}

impl Eq for LockKey {}

impl Hash for LockKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.number().hash(state);
    }
}

/// As PostgreSQL's functions take it: `-3` or `7, 12`.
impl fmt::Display for LockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BigInt(number) => write!(f, "{number}"),
            Self::Pair(first, second) => write!(f, "{first}, {second}"),
        }
    }
}

/// The number or the pair, after the name if there is one: `"nightly report"
/// (6597228812378105932)`.
impl fmt::Display for LockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(name) = &self.name {
            let shown: String = name.chars().take(SHOWN).collect();
            let more = if shown.len() < name.len() { "…" } else { "" };
            write!(f, "{shown:?}{more} ")?;
        }
        write!(f, "({})", self.number())
    }
}

impl fmt::Debug for LockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LockKey({self})")
    }
}
