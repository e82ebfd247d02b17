//! Keys of advisory locks: a name or a number, and the number that PostgreSQL locks.

mod hash;

use std::borrow::Cow;
use std::fmt;
use std::hash::{Hash, Hasher};

#[cfg(feature = "postgres")]
use diesel::pg::PgConnection;

use crate::input::Input;
use crate::text;

/// The number of characters of a name that `Debug` and `Display` show.
const SHOWN: usize = 80;

/// The name of an advisory lock, and the number that PostgreSQL locks for it.
///
/// PostgreSQL's advisory locks have no names. PostgreSQL locks a `bigint` or a pair of `int`, in two separate key spaces.
/// Keys are per database. A `LockKey` is the hash of a name, the hash of parts that are joined to a name, or a given
/// number. Two keys are equal if their numbers are equal, even if their names differ.
///
/// ```
/// use diesel_interlock::LockKey;
///
/// let booking = LockKey::parts(["server", "223", "345"]); // data centre, server
/// assert_eq!(booking, LockKey::named("server 223 345"));
/// assert_ne!(booking, LockKey::parts([223, 345]));
/// assert_eq!(LockKey::parts([223, 345]), LockKey::bigint(3755351481708176604));
/// assert_ne!(LockKey::pair(0, 1), LockKey::bigint(1));
/// # Ok::<(), diesel_interlock::Error>(())
/// ```
///
/// # Stability of the hash
///
/// The number of a name is the 64-bit FNV-1a hash of its UTF-8 bytes, read as a signed number. It never changes, because an
/// old and a new instance of an application could otherwise hold "the same" lock. It is part of this crate's contract, and
/// test vectors check it.
///
/// # Collisions
///
/// Two names may have the same number. They then exclude each other needlessly, which costs time and never safety. Among a
/// million names, the probability of any collision is about one in 37 million.
///
/// # Empty names
///
/// An empty name is an error. The first operation that uses the key returns
/// [`Input::EmptyName`](crate::error::Input::EmptyName) before anything is sent. A name may contain any character, NUL
/// included, because it is only hashed.
#[derive(Clone)]
pub struct LockKey {
    name: Option<Cow<'static, str>>,
    number: Number,
}

#[derive(Clone, Copy)]
enum Number {
    /// FNV-1a of the name. It is computed when it is needed, because `named` is `const` and the hasher is not.
    OfName,
    /// There is no number, because a part of the name could not be formatted.
    Unformatted,
    Given(LockId),
}

/// The number that PostgreSQL locks, in either of its two separate key spaces.
///
/// `LockId`s are ordered: `bigint` keys come before pairs, and each kind is ordered by number. Sessions that take several
/// locks in this order cannot deadlock.
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
    /// Returns the number of a `bigint` key. `None` for a pair.
    pub const fn as_bigint(self) -> Option<i64> {
        match self {
            LockId::BigInt(number) => Some(number),
            LockId::Pair(..) => None,
        }
    }
}

impl LockKey {
    /// Makes the key of a name, the 64-bit FNV-1a hash of its UTF-8 bytes.
    ///
    /// It is `const`, so that a lock can be a `static`. For a name that is built at run time use [`parts`](Self::parts) or
    /// `LockKey::from(String)`.
    pub const fn named(name: &'static str) -> Self {
        Self {
            name: Some(Cow::Borrowed(name)),
            number: Number::OfName,
        }
    }

    /// Makes the key of a name with several parts, such as a table and an id.
    ///
    /// Begin with what the key is for: all programs on a database share its keys, and `parts([7, 12])` of one purpose would be
    /// the key of another.
    ///
    /// One space joins the parts to a name. In each part `\` becomes `\\` and a space becomes `\ `, so different lists of
    /// parts are different names. For example, `["a b"]` differs from `["a", "b"]`. A list without parts is an empty name,
    /// which is an error. If the `Display` of a part returns an error, the first operation returns
    /// [`Input::Unformatted`](crate::error::Input::Unformatted).
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
            text::push_part(&mut name, &part);
        }
        Self::from(name)
    }

    /// Makes the key of a number, in the key space of `bigint`.
    pub const fn bigint(number: i64) -> Self {
        Self::numbered(LockId::BigInt(number))
    }

    /// Makes the key of a pair of numbers, in the key space of `(int, int)`, which is separate from that of `bigint`.
    pub const fn pair(first: i32, second: i32) -> Self {
        Self::numbered(LockId::Pair(first, second))
    }

    /// Makes the key that Ruby computes with `Zlib.crc32(name)` and Python with `zlib.crc32(name.encode())`, sent as a
    /// `bigint`. It is unsigned, so it is never negative.
    ///
    /// ```
    /// # use diesel_interlock::LockKey;
    /// assert_eq!(LockKey::crc32("223 345"), LockKey::bigint(1713753302));
    /// ```
    pub fn crc32(name: &str) -> Self {
        Self::foreign(name, LockId::BigInt(i64::from(hash::crc32(name))))
    }

    /// Makes the key of the hash that JavaScript programs commonly use, sent as a `bigint`:
    /// `hash = (hash << 5) - hash + str.charCodeAt(i) | 0`. It multiplies by 31 for each UTF-16 code unit and wraps in 32
    /// bits, as Java's `String.hashCode` does.
    ///
    /// ```
    /// # use diesel_interlock::LockKey;
    /// assert_eq!(LockKey::times31("myKey"), LockKey::bigint(104343827));
    /// ```
    pub fn times31(name: &str) -> Self {
        Self::foreign(name, LockId::BigInt(i64::from(hash::times31(name))))
    }

    /// Makes the key that version 2 and later of the Ruby gem [`with_advisory_lock`][gem] locks for a name: the pair of the
    /// name's CRC-32 without its highest bit, and 0.
    ///
    /// The gem does not hash an integer. It locks the lowest 31 bits of the integer and 0, so `with_advisory_lock(42)` locks
    /// `LockKey::pair(42, 0)`.
    ///
    /// [gem]: https://github.com/ClosureTree/with_advisory_lock
    pub fn with_advisory_lock(name: &str) -> Self {
        Self::with_advisory_lock_prefix(name, 0)
    }

    /// Makes the key of the gem where the environment variable `WITH_ADVISORY_LOCK_PREFIX` is set. The second number is then
    /// the prefix with its sign bit cleared.
    pub fn with_advisory_lock_prefix(name: &str, prefix: i32) -> Self {
        const MASK: i32 = i32::MAX;
        let hash = hash::crc32(name) as i32 & MASK;
        Self::foreign(name, LockId::Pair(hash, prefix & MASK))
    }

    /// Makes the key that version 1 of the Python package `django-pglocks` locks for a name: its CRC-32 as a signed 32-bit
    /// number, sent as a `bigint`.
    ///
    /// An integer is that [`bigint`](Self::bigint) there, and a tuple of two is that [`pair`](Self::pair).
    /// Version 2, which `pip install django-pglocks` installs today, takes another key:
    /// `django_pglocks_2`, with the feature `sha2`.
    pub fn django_pglocks_1(name: &str) -> Self {
        Self::foreign(name, LockId::BigInt(i64::from(hash::crc32(name) as i32)))
    }

    /// Makes the key that version 2 of the Python package `django-pglocks` and its successor `django-pgware` lock for a name:
    /// the first eight bytes of its SHA-256, big-endian and signed, sent as a `bigint`.
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

    /// Makes the key that the Python package `django-pglock` locks for a name: the first eight bytes of its SHA-256,
    /// little-endian and signed, sent as a `bigint`.
    ///
    /// An integer is that [`bigint`](Self::bigint) there. A decorator without an argument uses the name of the module and the
    /// function, such as `reports.tasks.nightly`.
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

    /// Returns the key for a guard, with the number that was locked. The number is then the same on every thread.
    pub(crate) fn with_id(&self, id: LockId) -> Self {
        Self {
            name: self.name.clone(),
            number: Number::Given(id),
        }
    }

    /// Returns the key as it is shown, with the number that it has now on this thread.
    pub(crate) fn shown(&self) -> ShownKey<'_> {
        self.shown_as(None)
    }

    /// Returns the key as it is shown, with the number that was locked if that is known.
    pub(crate) fn shown_as(&self, locked: Option<LockId>) -> ShownKey<'_> {
        ShownKey {
            name: self.name(),
            id: locked.or_else(|| self.number()),
        }
    }

    /// Returns the number for this key on a connection, which may carry a prefix of the tests.
    #[cfg(feature = "postgres")]
    pub(crate) fn id_on(&self, conn: &mut PgConnection) -> Result<LockId, Input> {
        let _names = text::names_on(conn);
        self.checked()
    }

    /// Returns the name that the key was made from, if there was one.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Makes a key with a fixed number, which a prefix of the tests does not change.
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

/// A key as it is shown, with the number that it had on its thread, or that was locked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ShownKey<'a> {
    name: Option<&'a str>,
    /// `None` if a part of the name could not be formatted.
    id: Option<LockId>,
}

/// The number or the pair, after the name where there is one: `"nightly report" (6597228812378105932)`.
impl fmt::Display for LockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shown().fmt(f)
    }
}

impl fmt::Display for ShownKey<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (shown, more) = text::shown(self.name.unwrap_or_default(), SHOWN);
        match (self.name, self.id) {
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
