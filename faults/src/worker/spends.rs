//! What the workers of both halves do alike with rate limits.

use std::time::Duration;

use diesel_interlock::{RateLimit, Reservation, Spent};
use fastrand::Rng;

use super::report::{report, violation};
use crate::chance::Chance;
use crate::clock::{self, Micros};
use crate::record::Record;
use crate::subjects::{CALLS, DEPLOYED, LIMITED_KEYS, LOGIN, OVERRIDDEN, PAID};

/// A call that is to be checked.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    /// With the key and the cost.
    pub(super) limit: RateLimit,
    pub(super) key: &'static str,
    pub(super) cost: u32,
    durable: bool,
    /// A time before the call.
    sent: Micros,
}

impl Wanted {
    /// A call of any rate limit.
    pub(super) fn any(random: &mut Rng) -> Self {
        match random.u64(..6) {
            0 => Self::of(&LOGIN, random),
            _ => Self::queued(random),
        }
    }

    /// A call of a rate limit that is also reserved.
    pub(super) fn queued(random: &mut Rng) -> Self {
        let limit = match random.u64(..9) {
            0 => &DEPLOYED[0],
            1..=2 => &DEPLOYED[1],
            3..=4 => &PAID,
            _ => &CALLS,
        };
        Self::of(limit, random)
    }

    pub(super) fn login(random: &mut Rng) -> Self {
        Self::of(&LOGIN, random)
    }

    /// Calls for a check of several limits.
    pub(super) fn several(random: &mut Rng) -> [Self; 3] {
        [
            Self::of(&PAID, random),
            Self::of(&CALLS, random),
            Self::of(&DEPLOYED[1], random),
        ]
    }

    fn of(limit: &RateLimit, random: &mut Rng) -> Self {
        let key = match random.u64(..6) {
            0..=3 => LIMITED_KEYS[0],
            4 => LIMITED_KEYS[1],
            _ => LIMITED_KEYS[2],
        };
        let cost = random.u32(1..=3);
        Self {
            limit: limit.key(key).cost(cost),
            key,
            cost,
            durable: limit.name() == PAID.name(),
            sent: clock::now(),
        }
    }

    /// Reports a call that was allowed. For one that was reserved, the units may be used from the end of its wait on.
    pub(super) fn allowed(&self, spent: &Spent) -> Given {
        let quota = spent.quota;
        let burst = quota.period.as_micros() * u128::from(quota.burst) / u128::from(quota.n);
        let wait = spent.full_in.as_micros().saturating_sub(burst);
        let at = spent.at.timestamp_micros();
        self.allowed_at(at, at + wait as Micros)
    }

    pub(super) fn reserved(&self, reservation: &Reservation) -> Given {
        let at = reservation.spent.at.timestamp_micros();
        self.allowed_at(at, reservation.usable_at().timestamp_micros())
    }

    pub(super) fn allowed_at(&self, at: Micros, usable: Micros) -> Given {
        let given = Given {
            limit: self.limit.name().to_owned(),
            key: self.key,
            at,
            usable,
        };
        report(&Record::Allowed {
            limit: given.limit.clone(),
            key: self.key.to_owned(),
            units: self.cost,
            at,
            usable,
            durable: self.durable,
            sent: self.sent,
        });
        given
    }

    /// The next call of the same kind.
    pub(super) fn again(&mut self) {
        self.sent = clock::now();
    }
}

/// Units that were allowed.
#[derive(Debug)]
pub(super) struct Given {
    limit: String,
    key: &'static str,
    at: Micros,
    usable: Micros,
}

/// How much the clock of the machine may differ from the one that measures a sleep, because it is adjusted meanwhile.
const ADJUSTMENT: Micros = 5_000;

impl Given {
    /// Reports that units are about to be given back, before anything is sent.
    pub(super) fn returning(&self, units: u32) {
        report(&Record::Returning {
            limit: self.limit.clone(),
            key: self.key.to_owned(),
            at: self.at,
            units,
        });
    }

    pub(super) fn returned(&self, units: u32) {
        report(&Record::Returned {
            limit: self.limit.clone(),
            key: self.key.to_owned(),
            at: self.at,
            units,
        });
    }

    /// A wait ends when the units may be used, and not before.
    pub(super) fn require_patience(&self) {
        let early = self.usable - clock::now();
        if early > ADJUSTMENT {
            violation(format!(
                "a wait for units of {:?} ended {early} µs too early",
                self.limit
            ));
        }
    }
}

/// Checks that an operation that must not spend units in a transaction was refused.
pub(super) fn require_refusal<T>(checked: &Result<T, diesel_interlock::Error>) {
    use diesel_interlock::Error;
    use diesel_interlock::error::Misplaced;
    match checked {
        Ok(_) => violation("a check in a transaction was not refused"),
        Err(Error::Misplaced(Misplaced::SpendInTransaction)) => {}
        // The connection may break before.
        Err(_) => {}
    }
}

/// How long a reservation may have to wait.
pub(super) fn any_wait(random: &mut Rng) -> Duration {
    random.millis(0, 1500)
}

/// The statement of an operator who sets or deletes an override, of a key or of all of them.
pub(super) fn override_statement(random: &mut Rng) -> String {
    let name = DEPLOYED[0].name();
    let key = if random.one_in(2) {
        "NULL".to_owned()
    } else {
        format!("'{}'", LIMITED_KEYS[0])
    };
    if random.one_in(2) {
        return format!(
            "DELETE FROM resource_control.rate_limit_override WHERE name = '{name}' AND key IS NOT DISTINCT FROM {key}"
        );
    }
    format!(
        "INSERT INTO resource_control.rate_limit_override (name, key, n, period, burst) \
         VALUES ('{name}', {key}, {}, '{} us', {}) ON CONFLICT (name, scope) DO UPDATE SET n = EXCLUDED.n",
        OVERRIDDEN.n,
        OVERRIDDEN.period.as_micros(),
        OVERRIDDEN.burst
    )
}
