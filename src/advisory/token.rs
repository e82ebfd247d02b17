//! The fencing tokens of the guards that exist. Guards of one lock on one session hold it together, so they share a token.
//! With a separate token, a nested guard that passes a fence would block the outer one there.

use std::sync::{Arc, Mutex, Weak};

use super::lock::{Lock, LockMode};
use crate::panics::lock;

/// A fencing token, shared by the guards that hold the lock together.
#[derive(Debug)]
pub(super) struct Token(Arc<Drawn>);

#[derive(Debug)]
struct Drawn {
    /// The name of the session, until some code resets it.
    session: String,
    lock: Lock,
    number: i64,
}

static LIVE: Mutex<Vec<Weak<Drawn>>> = Mutex::new(Vec::new());

impl Token {
    /// Returns the token of a guard for which the session has just drawn this number. If an outer guard has a token, it is
    /// that one.
    pub(super) fn drawn(session: String, of: Lock, number: i64) -> Self {
        let drawn = Drawn {
            session,
            lock: of,
            number,
        };
        let mut live = lock(&LIVE);
        live.retain(|token| token.strong_count() > 0);
        let outer = live.iter().filter_map(Weak::upgrade);
        let latest = outer
            .filter(|outer| outer.covers(&drawn))
            .max_by_key(|outer| outer.number);
        Self(latest.unwrap_or_else(|| {
            let drawn = Arc::new(drawn);
            live.push(Arc::downgrade(&drawn));
            drawn
        }))
    }

    pub(super) fn number(&self) -> i64 {
        self.0.number
    }
}

impl Drawn {
    /// A guard that takes exclusively what its session holds shared comes after other sharers, so it needs a token of its
    /// own.
    fn covers(&self, inner: &Self) -> bool {
        self.session == inner.session
            && self.lock.id == inner.lock.id
            && (self.lock.mode == LockMode::Exclusive || inner.lock.mode == LockMode::Shared)
    }
}

#[cfg(test)]
mod tests {
    use super::LockMode::{Exclusive, Shared};
    use super::*;
    use crate::key::LockId;

    #[test]
    fn guards_that_hold_a_lock_together_have_one_token() {
        let (id, other_id) = (LockId::BigInt(1), LockId::Pair(0, 1));
        let outer = Token::drawn(
            "here".into(),
            Lock {
                id,
                mode: Exclusive,
            },
            10,
        );
        let token =
            |session: &str, id, mode| Token::drawn(session.into(), Lock { id, mode }, 11).number();
        assert_eq!(token("here", id, Exclusive), 10);
        assert_eq!(token("here", id, Shared), 10);
        assert_eq!(token("here", other_id, Exclusive), 11);
        assert_eq!(token("elsewhere", id, Exclusive), 11);
        drop(outer);
        assert_eq!(token("here", id, Exclusive), 11);

        let token = |mode, number| Token::drawn("here".into(), Lock { id, mode }, number);
        let sharer = token(Shared, 20);
        let upgraded = token(Exclusive, 21);
        assert_eq!(upgraded.number(), 21);
        assert_eq!(token(Shared, 22).number(), 21);
        drop(upgraded);
        assert_eq!(token(Shared, 23).number(), 20);
        drop(sharer);
    }

    /// Takes the lock on the same session at the earliest moment at which the pool can lend the connection again.
    #[cfg(feature = "r2d2")]
    #[derive(Debug, Default)]
    struct NextHolder {
        session: Mutex<Option<String>>,
        number: Mutex<Option<i64>>,
    }

    #[cfg(feature = "r2d2")]
    #[derive(Debug)]
    struct Waiting(Arc<NextHolder>);

    #[cfg(feature = "r2d2")]
    impl diesel::r2d2::HandleEvent for Waiting {
        fn handle_checkin(&self, _: diesel::r2d2::event::CheckinEvent) {
            if let Some(session) = self.0.session.lock().unwrap().clone() {
                let of = Lock {
                    id: LockId::BigInt(7),
                    mode: Exclusive,
                };
                let next = Token::drawn(session, of, i64::MAX);
                *self.0.number.lock().unwrap() = Some(next.number());
            }
        }
    }

    #[cfg(feature = "r2d2")]
    #[test]
    fn the_next_holder_on_a_pooled_session_has_a_token_of_its_own() {
        use diesel::prelude::*;
        use diesel::sql_types::Text;

        let database = workbench::Database::new();
        let next = Arc::new(NextHolder::default());
        let pool = diesel::r2d2::Pool::builder()
            .max_size(1)
            .event_handler(Box::new(Waiting(Arc::clone(&next))))
            .build(database.manager())
            .unwrap();
        let lock = crate::AdvisoryLock::new(crate::LockKey::bigint(7)).fenced();
        for release in [
            |guard: crate::PooledGuard| guard.release().unwrap(),
            |guard| drop(guard),
        ] {
            let mut guard = lock.try_acquire(&pool).unwrap().acquired().unwrap();
            let name = diesel::dsl::sql::<Text>("current_setting('diesel_interlock.session')");
            let session: String = diesel::select(name).get_result(guard.conn()).unwrap();
            *next.session.lock().unwrap() = Some(session);
            release(guard);
            assert_eq!(next.number.lock().unwrap().take(), Some(i64::MAX));
            *next.session.lock().unwrap() = None;
        }
    }
}
