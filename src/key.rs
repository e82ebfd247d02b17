//! What is locked: a number, and how to come by it.

mod hash;

use std::borrow::Cow;
use std::fmt;
use std::hash::{Hash, Hasher};

use diesel::pg::PgConnection;

use crate::input::Input;
use crate::text;

/// The longest piece of a name that `Debug` and `Display` show, in characters.
const SHOWN: usize = 80;

/// The name of an advisory lock, and the number that PostgreSQL locks for it.
///
/// PostgreSQL's advisory locks have no names: it locks a `bigint`, or a pair of `int`, and the
/// two spaces never meet. Keys are per database. A `LockKey` is made from a name by hashing, from
/// parts that are joined to a name, or straight from numbers; two keys are equal if their numbers
/// are, whatever their names.
///
/// ```
/// use diesel_interlock::LockKey;
///
/// let booking = LockKey::parts([223, 345]); // data centre, server
/// assert_eq!(booking, LockKey::named("223 345"));
/// assert_eq!(booking, LockKey::bigint(3755351481708176604));
/// assert_ne!(LockKey::pair(0, 1), LockKey::bigint(1));
/// # Ok::<(), diesel_interlock::Error>(())
/// ```
///
/// # The hash never changes
///
/// A name's number is the 64-bit FNV-1a hash of its UTF-8 bytes, read as a signed number. If it
/// changed between two releases, an old and a new instance of an application could both hold "the
/// same" lock, so it is part of this crate's contract and held by test vectors.
///
/// # Two names, one number
///
/// Two different names may have the same number; they then exclude each other for no reason,
/// which costs waiting and never safety. Among a million names, the chance that any two meet is
/// about one in 37 million.
///
/// # An empty name
///
/// is an error, reported as [`Input::EmptyName`](crate::error::Input::EmptyName) by the first operation that uses the key, before
/// anything is sent. A name may hold any character, NUL included: it is only hashed.
#[derive(Clone)]
pub struct LockKey {
    name: Option<Cow<'static, str>>,
    number: Number,
}

#[derive(Clone, Copy)]
enum Number {
    /// FNV-1a of the name, computed when it is needed: `named` is `const`, the hasher is not.
    OfName,
    /// None, since a part of the name could not be formatted.
    Unformatted,
    Given(LockId),
}

/// The number that PostgreSQL locks, in either of its two separate key spaces.
///
/// Its order is the one order in which sessions that need several locks can take them without a
/// deadlock: `bigint` keys come before pairs, and each are ordered by their numbers.
///
/// ```
/// use diesel_interlock::LockKey;
///
/// let mut ids = [LockKey::pair(0, 1).id()?, LockKey::named("b").id()?, LockKey::bigint(7).id()?];
/// ids.sort();
/// assert_eq!(ids[2], LockKey::pair(0, 1).id()?);
/// # Ok::<(), diesel_interlock::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LockId {
    /// One 64-bit number, as in `pg_advisory_lock(bigint)`.
    BigInt(i64),
    /// Two 32-bit numbers, as in `pg_advisory_lock(int, int)`.
    Pair(i32, i32),
}

impl LockId {
    /// The number of a `bigint` key; `None` for a pair.
    pub const fn as_bigint(self) -> Option<i64> {
        match self {
            LockId::BigInt(number) => Some(number),
            LockId::Pair(..) => None,
        }
    }
}

impl LockKey {
    /// Names a lock: the key is the 64-bit FNV-1a hash of the name's UTF-8 bytes.
    ///
    /// `const`, so that a lock can be a `static`. For a name that is put together at run time use
    /// [`parts`](Self::parts), or `LockKey::from(String)`.
    pub const fn named(name: &'static str) -> Self {
        Self {
            name: Some(Cow::Borrowed(name)),
            number: Number::OfName,
        }
    }

    /// Names a lock by its parts, such as a table and an id.
    ///
    /// The parts are joined by one space to a name. In each part `\` becomes `\\` and a space
    /// becomes `\ `, so different lists of parts are different names: `["a b"]` is not
    /// `["a", "b"]`. No parts at all is an empty name, and thereby an error. So is a part whose `Display`
    /// returns an error; the first operation reports it, as [`Input::Unformatted`](crate::error::Input::Unformatted).
    ///
    /// ```
    /// use diesel_interlock::LockKey;
    ///
    /// assert_eq!(LockKey::parts(["tenant", "7"]), LockKey::named("tenant 7"));
    /// assert_eq!(LockKey::parts(["tenant 7"]), LockKey::named(r"tenant\ 7"));
    /// assert!(LockKey::parts([""; 0]).id().is_err());
    /// ```
    pub fn parts<I>(parts: I) -> Self
    where
        I: IntoIterator,
        I::Item: fmt::Display,
    {
        let mut name = String::new();
        for (position, part) in parts.into_iter().enumerate() {
            if position > 0 {
                name.push(' ');
            }
            let Some(part) = text::formatted(part) else {
                return Self {
                    name: Some(Cow::Owned(name)),
                    number: Number::Unformatted,
                };
            };
            for character in part.chars() {
                if matches!(character, '\\' | ' ') {
                    name.push('\\');
                }
                name.push(character);
            }
        }
        Self::from(name)
    }

    /// Locks the number itself, in the space of `bigint`.
    pub const fn bigint(number: i64) -> Self {
        Self::numbered(LockId::BigInt(number))
    }

    /// Locks a pair of numbers, in the space of `(int, int)`, which never meets that of `bigint`.
    pub const fn pair(first: i32, second: i32) -> Self {
        Self::numbered(LockId::Pair(first, second))
    }

    /// The key that `Zlib.crc32(name)` gives in Ruby and `zlib.crc32(name.encode())` in Python,
    /// sent as a `bigint`: unsigned, so never negative.
    ///
    /// ```
    /// # use diesel_interlock::LockKey;
    /// assert_eq!(LockKey::crc32("223 345"), LockKey::bigint(1713753302));
    /// ```
    pub fn crc32(name: &str) -> Self {
        Self::foreign(name, LockId::BigInt(i64::from(hash::crc32(name))))
    }

    /// The key of the hash that JavaScript programs usually bring along, sent as a `bigint`:
    /// `hash = (hash << 5) - hash + str.charCodeAt(i) | 0`, which is 31-fold over UTF-16 code
    /// units, wrapping in 32 bits, and the same as Java's `String.hashCode`.
    ///
    /// ```
    /// # use diesel_interlock::LockKey;
    /// assert_eq!(LockKey::times31("myKey"), LockKey::bigint(104343827));
    /// ```
    pub fn times31(name: &str) -> Self {
        Self::foreign(name, LockId::BigInt(i64::from(hash::times31(name))))
    }

    /// The key that version 2 and later of the Ruby gem [`with_advisory_lock`][gem] takes for a
    /// name: the pair of the name's CRC-32 without its highest bit, and 0.
    ///
    /// The gem does not hash an integer: `with_advisory_lock(42)` locks `LockKey::pair(42, 0)`, as any
    /// other integer locks its lowest 31 bits and 0.
    ///
    /// [gem]: https://github.com/ClosureTree/with_advisory_lock
    pub fn with_advisory_lock(name: &str) -> Self {
        Self::with_advisory_lock_prefix(name, 0)
    }

    /// The key of the gem where the environment variable `WITH_ADVISORY_LOCK_PREFIX` is set: the
    /// second number is then the prefix, without its sign.
    pub fn with_advisory_lock_prefix(name: &str, prefix: i32) -> Self {
        const MASK: i32 = i32::MAX;
        let hash = hash::crc32(name) as i32 & MASK;
        Self::foreign(name, LockId::Pair(hash, prefix & MASK))
    }

    /// The key that version 1 of the Python package `django-pglocks` takes for a name: its CRC-32 as
    /// a signed 32-bit number, sent as a `bigint`.
    ///
    /// An integer is that [`bigint`](Self::bigint) there, and a tuple of two is that [`pair`](Self::pair).
    /// Version 2, which `pip install django-pglocks` installs today, takes another key:
    /// `django_pglocks_2`, with the feature `sha2`.
    pub fn django_pglocks_1(name: &str) -> Self {
        Self::foreign(name, LockId::BigInt(i64::from(hash::crc32(name) as i32)))
    }

    /// The key that version 2 of the Python package `django-pglocks`, and `django-pgware`, to which it
    /// has moved, take for a name: the first eight bytes of its SHA-256, big-endian and signed, sent as a
    /// `bigint`.
    ///
    /// An integer is that [`bigint`](Self::bigint) there, and a tuple of two is that [`pair`](Self::pair).
    ///
    /// ```
    /// # use diesel_interlock::LockKey;
    /// assert_eq!(LockKey::django_pglocks_2("223 345"), LockKey::bigint(-284536697673700257));
    /// ```
    #[cfg(feature = "sha2")]
    pub fn django_pglocks_2(name: &str) -> Self {
        let key = i64::from_be_bytes(hash::sha256(name));
        Self::foreign(name, LockId::BigInt(key))
    }

    /// The key that the Python package `django-pglock` takes for a name: the first eight bytes of its
    /// SHA-256, little-endian and signed, sent as a `bigint`.
    ///
    /// An integer is that [`bigint`](Self::bigint) there. As a decorator without an argument, it takes the
    /// name of the module and the function, such as `reports.tasks.nightly`.
    ///
    /// ```
    /// # use diesel_interlock::LockKey;
    /// assert_eq!(LockKey::django_pglock("223 345"), LockKey::bigint(6894052845404753404));
    /// ```
    #[cfg(feature = "sha2")]
    pub fn django_pglock(name: &str) -> Self {
        let key = i64::from_le_bytes(hash::sha256(name));
        Self::foreign(name, LockId::BigInt(key))
    }

    /// Returns the number, unless the name is invalid.
    pub(crate) fn checked(&self) -> Result<LockId, Input> {
        let number = self.number().ok_or(Input::Unformatted)?;
        if self.name.as_deref().is_some_and(str::is_empty) {
            return Err(Input::EmptyName);
        }
        Ok(number)
    }

    /// The key that a guard keeps: what was locked stays what it was, on whichever thread it is asked.
    pub(crate) fn with_id(&self, id: LockId) -> Self {
        Self {
            name: self.name.clone(),
            number: Number::Given(id),
        }
    }

    /// The number for this key on that connection, which may carry a prefix of the tests.
    pub(crate) fn id_on(&self, conn: &mut PgConnection) -> Result<LockId, Input> {
        let _names = text::names_on(conn);
        self.checked()
    }

    /// The name that the key was made from, if there was one.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// A name whose number nothing changes, a prefix of the tests neither.
    pub(crate) const fn frozen(name: &'static str, number: i64) -> Self {
        Self {
            name: Some(Cow::Borrowed(name)),
            number: Number::Given(LockId::BigInt(number)),
        }
    }

    const fn numbered(id: LockId) -> Self {
        Self {
            name: None,
            number: Number::Given(id),
        }
    }

    fn foreign(name: &str, id: LockId) -> Self {
        Self {
            name: Some(Cow::Owned(name.to_owned())),
            number: Number::Given(id),
        }
    }

    fn number(&self) -> Option<LockId> {
        match (self.number, &self.name) {
            (Number::Given(id), _) => Some(id),
            (Number::OfName, name) => {
                let name = text::prefixed(name.as_deref().unwrap_or_default());
                Some(LockId::BigInt(fnv1a(&name)))
            }
            (Number::Unformatted, _) => None,
        }
    }
}

/// 64-bit FNV-1a of a name's UTF-8 bytes, read as a signed number: the hash behind
/// [`LockKey::named`], for those who put keys into their own SQL.
///
/// Python's `fnv.hash(data, algorithm=fnv.fnv_1a, bits=64)` returns the same bits unsigned, which
/// PostgreSQL refuses as a `bigint` for half of all names: there, subtract 2⁶⁴ from what is 2⁶³ or more.
///
/// ```
/// assert_eq!(diesel_interlock::fnv1a("223 345"), 3755351481708176604);
/// assert_eq!(diesel_interlock::fnv1a(""), -3750763034362895579);
/// ```
pub fn fnv1a(name: &str) -> i64 {
    hash::fnv1a(name)
}

impl From<&str> for LockKey {
    fn from(name: &str) -> Self {
        Self::from(name.to_owned())
    }
}

impl From<String> for LockKey {
    fn from(name: String) -> Self {
        Self {
            name: Some(Cow::Owned(name)),
            number: Number::OfName,
        }
    }
}

impl From<i64> for LockKey {
    fn from(number: i64) -> Self {
        Self::bigint(number)
    }
}

impl From<(i32, i32)> for LockKey {
    fn from((first, second): (i32, i32)) -> Self {
        Self::pair(first, second)
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

/// The number or the pair, after the name where there is one: `"nightly report" (6597228812378105932)`.
impl fmt::Display for LockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name.as_deref().unwrap_or_default();
        let (shown, more) = match name.char_indices().nth(SHOWN) {
            Some((end, _)) => (&name[..end], "…"),
            None => (name, ""),
        };
        match (&self.name, self.number()) {
            (None, Some(LockId::BigInt(number))) => number.fmt(f),
            (None, Some(id)) => write!(f, "({id})"),
            (Some(_), Some(id)) => write!(f, "{shown:?}{more} ({id})"),
            (_, None) => write!(f, "{shown:?}{more} (not formatted)"),
        }
    }
}

impl fmt::Debug for LockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LockKey({self})")
    }
}

/// As one writes it in SQL: `7`, or `1, 2`.
impl fmt::Display for LockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LockId::BigInt(number) => number.fmt(f),
            LockId::Pair(first, second) => write!(f, "{first}, {second}"),
        }
    }
}
