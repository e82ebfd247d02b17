//! Invalid arguments.

/// An invalid argument: the kind [`Error::Input`](crate::Error::Input). Nothing was sent, except for
/// [`CostAboveBurst`](Self::CostAboveBurst).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Input {
    /// The name of a lock, a service, a rate limit or a fence is empty, or the key of a lock has no parts.
    #[error(
        "cannot use an empty name: everything without a name would be the same lock, service, limit or fence; pass a name, or \
         at least one part for the key of a lock"
    )]
    EmptyName,

    /// A part of a lock's key, or the key of a throttle or a rate limit, could not be formatted.
    #[error(
        "cannot format a key: the Display of one of its parts returned an error; correct that implementation"
    )]
    Unformatted,

    /// The details of an attempt are empty.
    #[error(
        "cannot attempt a throttle without details: operators could not tell who took the resource; pass a host and a \
         process id, for example"
    )]
    EmptyDetails,

    /// The key of a throttle or a rate limit is empty.
    #[error(
        "cannot use an empty key of a throttle or a rate limit: it would be shared by everything without a key; omit the \
         key, or pass what is to be limited"
    )]
    EmptyKey,

    /// A text contains the character NUL.
    #[error("cannot send a text with a NUL character: PostgreSQL does not store it; remove it")]
    NulCharacter,

    /// A text is longer than its limit.
    #[error("cannot send {what}: the limit is {longest} bytes; shorten the text")]
    TooLong {
        /// Which text.
        what: &'static str,
        /// The limit in bytes.
        longest: usize,
    },

    /// The label of a resource is empty or longer than the 63 bytes of a PostgreSQL enum label.
    #[error(
        "cannot use the resource label {label:?}: a PostgreSQL enum label has 1 to 63 bytes; rename the resource"
    )]
    BadLabel {
        /// The label.
        label: String,
    },

    /// The interval of a resource is zero, or longer than a thousand years of 360 days.
    #[error(
        "cannot use the interval of the resource {label:?}: it must be longer than zero and at most a thousand years; \
         correct its declaration"
    )]
    BadInterval {
        /// The resource.
        label: String,
    },

    /// A semaphore has no slots, or more than a PostgreSQL `smallint` can number.
    #[error(
        "cannot use {slots} slots for the semaphore {service:?}: a semaphore has 1 to 32767; correct its declaration"
    )]
    BadSlots {
        /// The service.
        service: String,
        /// The number of slots.
        slots: u32,
    },

    /// The timeout of a semaphore is zero, or longer than a thousand years of 360 days.
    #[error(
        "cannot use the timeout of the semaphore {service:?}: it must be longer than zero and at most a thousand years; \
         correct its declaration"
    )]
    BadTimeout {
        /// The service.
        service: String,
    },

    /// The quota of a rate limit is out of range.
    #[error(
        "cannot use the quota of the rate limit {name:?}: N and the burst are at least 1, the period is longer than zero and \
         at most 366 days, and the burst is refilled within 36600 days; correct its declaration"
    )]
    BadQuota {
        /// The name of the limit.
        name: String,
    },

    /// The cost of a call is zero, or more units were to be given back than were spent.
    #[error(
        "cannot spend or give back {units} units of the rate limit {name:?}: {}; correct the call",
        possible_units(*.most)
    )]
    BadUnits {
        /// The name of the limit.
        name: String,
        /// The number of units.
        units: u32,
        /// The largest number that is possible. Zero if all units of the call were given back before.
        most: u32,
    },

    /// The cost of a call is above the burst of its quota, so it would never be allowed. The database decides this, because an
    /// operator may have raised the burst. Nothing was changed.
    #[error(
        "cannot spend {cost} units of the rate limit {name:?} at once: its burst is {burst}; raise the burst, or split the \
         call"
    )]
    CostAboveBurst {
        /// The name of the limit.
        name: String,
        /// The cost of the call.
        cost: u32,
        /// The burst of the program's quota.
        burst: u32,
    },

    /// The same key is among several limits that are checked at once, with different quotas.
    #[error(
        "cannot check the rate limit {name:?} twice at once: the two have the same key and different quotas; use one declaration"
    )]
    DifferentQuotas {
        /// The name of the limit.
        name: String,
    },
}

fn possible_units(most: u32) -> String {
    match most {
        0 => "all units of the call were given back before".to_owned(),
        most => format!("the number must be 1 to {most}"),
    }
}
