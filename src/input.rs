//! Invalid arguments.

/// An invalid argument: the kind [`Error::Input`](crate::Error::Input). Nothing was sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Input {
    /// The name of a lock, a service or a fence is empty, or the key of a lock has no parts.
    #[error(
        "cannot use an empty name: everything without a name would be the same lock, service or fence; pass a name, or at \
         least one part for the key of a lock"
    )]
    EmptyName,

    /// A part of a lock's key, or the key of a throttle, could not be formatted.
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

    /// The key of a throttle is empty.
    #[error(
        "cannot attempt a throttle with an empty key: it would be shared by everything without a key; omit the key, or \
         pass what the resource is throttled for"
    )]
    EmptyKey,

    /// A text contains the character NUL.
    #[error("cannot send a text with a NUL character: PostgreSQL does not store it; remove it")]
    NulCharacter,

    /// A text is longer than its limit.
    #[error(
        "cannot send {what}: the limit is {longest} bytes; shorten the text, or pass a hash of it"
    )]
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

    /// The interval of a resource is zero, or longer than a thousand years.
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

    /// The timeout of a semaphore is zero, or longer than a thousand years.
    #[error(
        "cannot use the timeout of the semaphore {service:?}: it must be longer than zero and at most a thousand years; \
         correct its declaration"
    )]
    BadTimeout {
        /// The service.
        service: String,
    },
}
