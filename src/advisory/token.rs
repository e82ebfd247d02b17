//! The fencing tokens of the guards that live. Guards of one lock on one session hold it together, so they have
//! one token: with one of its own, a nested guard that passes a fence would keep the outer one out.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use diesel::data_types::PgTimestamp;

use super::mode::LockMode;
use crate::key::LockId;

/// A fencing token, shared by the guards that hold the lock together.
#[derive(Debug)]
pub(super) struct Token(Arc<Drawn>);

#[derive(Debug)]
struct Drawn {
    session: Session,
    id: LockId,
    mode: LockMode,
    number: i64,
}

/// A server session. The server uses a pid again, and another server has its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Session {
    pub(super) pid: i32,
    /// `None` where it is hidden: the session is then like no other.
    pub(super) start: Option<PgTimestamp>,
}

static LIVE: Mutex<Vec<Weak<Drawn>>> = Mutex::new(Vec::new());

impl Token {
    /// The token of a guard for which the session has just drawn this number: that of a guard further out, if
    /// there is one.
    pub(super) fn drawn(session: Session, id: LockId, mode: LockMode, number: i64) -> Self {
        let drawn = Drawn {
            session,
            id,
            mode,
            number,
        };
        let mut live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
        live.retain(|token| token.strong_count() > 0);
        let further_out = live.iter().filter_map(Weak::upgrade);
        let latest = further_out
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
    /// Who takes exclusively what its session holds shared comes after other sharers, and needs a token of its
    /// own.
    fn covers(&self, inner: &Self) -> bool {
        self.session.start.is_some()
            && self.session == inner.session
            && self.id == inner.id
            && (self.mode == LockMode::Exclusive || inner.mode == LockMode::Shared)
    }
}

#[cfg(test)]
mod tests {
    use super::LockMode::{Exclusive, Shared};
    use super::*;

    #[test]
    fn guards_that_hold_a_lock_together_have_one_token() {
        let here = Session {
            pid: -1,
            start: Some(PgTimestamp(1)),
        };
        let (id, other_id) = (LockId::BigInt(1), LockId::Pair(0, 1));
        let later = Session {
            start: Some(PgTimestamp(2)),
            ..here
        };
        let hidden = Session {
            start: None,
            ..here
        };
        let outer = Token::drawn(here, id, Exclusive, 10);
        let hidden_outer = Token::drawn(hidden, id, Exclusive, 10);
        let token = |session, id, mode| Token::drawn(session, id, mode, 11).number();
        assert_eq!(token(here, id, Exclusive), 10);
        assert_eq!(token(here, id, Shared), 10);
        assert_eq!(token(here, other_id, Exclusive), 11);
        assert_eq!(token(later, id, Exclusive), 11);
        assert_eq!(token(Session { pid: -2, ..here }, id, Exclusive), 11);
        assert_eq!(token(hidden, id, Exclusive), 11);
        drop((outer, hidden_outer));
        assert_eq!(token(here, id, Exclusive), 11);

        let sharer = Token::drawn(here, id, Shared, 20);
        let upgraded = Token::drawn(here, id, Exclusive, 21);
        assert_eq!(upgraded.number(), 21);
        assert_eq!(Token::drawn(here, id, Shared, 22).number(), 21);
        drop(upgraded);
        assert_eq!(Token::drawn(here, id, Shared, 23).number(), 20);
        drop(sharer);
    }
}
