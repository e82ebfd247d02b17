//! What a release comes to: a decision without a connection.

use crate::transaction::Transaction;

/// What the server said to an unlock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unlocked {
    WasHeld,
    WasNotHeld,
    /// Another session replied, and nothing was unlocked.
    SessionMoved,
}

/// What becomes of the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    /// It goes back as it is, to its pool or to the caller.
    Keep,
    /// It cannot be trusted: a pool discards it, and a caller gets it back marked as broken.
    GiveUp,
}

/// What the release reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Loss {
    Lock,
    SessionMoved,
    /// A transaction was left open.
    Commit,
}

/// What is known once the server has replied to an unlock.
#[derive(Debug, Clone, Copy)]
pub(super) struct Release {
    /// The transaction on the connection as the release began.
    pub(super) before: Transaction,
    pub(super) unlocked: Unlocked,
    /// Whether a transaction was open as the server replied, whoever opened it.
    pub(super) left_open: bool,
    pub(super) pooled: bool,
    /// Whether a guard further in left a lock behind on the session.
    pub(super) distrusted: bool,
}

impl Release {
    pub(super) fn verdict(self) -> (Fate, Option<Loss>) {
        (self.fate(), self.loss())
    }

    fn fate(self) -> Fate {
        let clean = self.unlocked == Unlocked::WasHeld && !self.left_open && !self.distrusted;
        match self.before {
            _ if self.unlocked == Unlocked::SessionMoved => Fate::GiveUp,
            // Somebody had marked the connection, and meant it.
            Transaction::Broken => Fate::GiveUp,
            // To discard it costs the pool little; a caller may still use it.
            _ if clean || !self.pooled => Fate::Keep,
            _ => Fate::GiveUp,
        }
    }

    fn loss(self) -> Option<Loss> {
        match self.unlocked {
            Unlocked::SessionMoved => Some(Loss::SessionMoved),
            Unlocked::WasNotHeld => Some(Loss::Lock),
            Unlocked::WasHeld if self.left_open => Some(Loss::Commit),
            Unlocked::WasHeld => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Fate::{GiveUp, Keep};
    use super::Unlocked::{SessionMoved, WasHeld, WasNotHeld};
    use super::*;
    use crate::transaction::Transaction::{Broken, None as Outside, Open, Test};

    #[test]
    fn a_release_comes_to_what_the_table_says() {
        let lock = Some(Loss::Lock);
        let commit = Some(Loss::Commit);
        let moved = Some(Loss::SessionMoved);
        // before, unlocked, left open: pooled, borrowed, report
        for (before, unlocked, left_open, pooled, borrowed, loss) in [
            (Outside, WasHeld, false, Keep, Keep, None),
            (Outside, WasHeld, true, GiveUp, Keep, commit),
            (Outside, WasNotHeld, false, GiveUp, Keep, lock),
            (Outside, WasNotHeld, true, GiveUp, Keep, lock),
            (Open, WasHeld, true, GiveUp, Keep, commit),
            (Open, WasNotHeld, true, GiveUp, Keep, lock),
            (Test, WasHeld, false, Keep, Keep, None),
            (Test, WasNotHeld, false, GiveUp, Keep, lock),
            (Broken, WasHeld, false, GiveUp, GiveUp, None),
            (Broken, WasHeld, true, GiveUp, GiveUp, commit),
            (Broken, WasNotHeld, false, GiveUp, GiveUp, lock),
            (Outside, SessionMoved, false, GiveUp, GiveUp, moved),
            (Open, SessionMoved, true, GiveUp, GiveUp, moved),
            (Test, SessionMoved, false, GiveUp, GiveUp, moved),
            (Broken, SessionMoved, true, GiveUp, GiveUp, moved),
        ] {
            for (is_pooled, fate) in [(true, pooled), (false, borrowed)] {
                let release = Release {
                    before,
                    unlocked,
                    left_open,
                    pooled: is_pooled,
                    distrusted: false,
                };
                assert_eq!(release.verdict(), (fate, loss), "{release:?}");
                // A session that holds what nobody accounts for leaves the pool; the report is the same.
                let distrusted = Release {
                    distrusted: true,
                    ..release
                };
                let fate = if is_pooled { GiveUp } else { fate };
                assert_eq!(distrusted.verdict(), (fate, loss), "{distrusted:?}");
            }
        }
    }
}
