//! Claims of ticks that have had no reply. If such a claim was granted after all, it is an orphan,
//! because its run never began. The next look recognizes the orphan and gives it back, so that it
//! does not count as an attempt.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};

use crate::alarm::lock;
use crate::lease::claim_number;

/// The numbers of a loop's claims that have had no reply. Each loop has its own, because another
/// loop of the process may be running the tick of its claim.
#[derive(Debug, Default)]
pub(super) struct Unanswered(Vec<Claim>);

#[derive(Debug)]
struct Claim {
    /// The token that the look before the claim has seen. All claims after looks at the same token
    /// have the same number, because at most one of them is granted.
    seen: i64,
    number: i64,
    /// Whether a claim with this number is known to have no reply.
    has_no_reply: bool,
}

impl Unanswered {
    /// Returns the number for a claim that is about to be sent.
    pub(super) fn begin(&mut self, seen: i64) -> i64 {
        if let Some(claim) = self.0.iter().find(|claim| claim.seen == seen) {
            return claim.number;
        }
        let number = claim_number();
        self.0.push(Claim {
            seen,
            number,
            has_no_reply: false,
        });
        number
    }

    /// Notes the reply to a claim. An earlier claim with the same number may still be an orphan,
    /// unless this one was granted.
    pub(super) fn note_answer(&mut self, number: i64, was_granted: bool) {
        self.0
            .retain(|claim| claim.number != number || claim.has_no_reply && !was_granted);
    }

    /// Notes that a claim, which may have been sent, has had no reply.
    pub(super) fn note_no_reply(&mut self, number: i64) {
        for claim in &mut self.0 {
            claim.has_no_reply |= claim.number == number;
        }
    }

    /// Whether the last claim of the row is one of these orphans. Forgets claims that can no longer
    /// be granted, because the row has another token than they have seen.
    pub(super) fn is_orphan(&mut self, token: i64, number: Option<i64>) -> bool {
        let is_orphan = |claim: &Claim| Some(claim.number) == number;
        self.0
            .retain(|claim| claim.seen == token || is_orphan(claim));
        self.0.iter().any(is_orphan)
    }

    /// Notes that the orphan was given back.
    pub(super) fn strike_off(&mut self, number: Option<i64>) {
        self.0.retain(|claim| Some(claim.number) != number);
    }
}

/// The claims of single looks (`run_due`), by the name of the schedule. A look takes them out for
/// its duration. Otherwise a second look at the same time would take the first one's claim for an
/// orphan.
static OF_LOOKS: LazyLock<Mutex<HashMap<String, Unanswered>>> = LazyLock::new(Mutex::default);

/// Takes the claims of a schedule out, for a single look.
pub(super) fn take(name: String) -> Taken {
    let unanswered = lock(&OF_LOOKS).remove(&name).unwrap_or_default();
    Taken { name, unanswered }
}

/// The claims of a single look. Its drop puts back those without a reply. A claim that is still
/// under way in a dropped future is not put back: the background gives it back.
pub(super) struct Taken {
    name: String,
    pub(super) unanswered: Unanswered,
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.unanswered.0.retain(|claim| claim.has_no_reply);
        if !self.unanswered.0.is_empty() {
            let name = std::mem::take(&mut self.name);
            let mut of_looks = lock(&OF_LOOKS);
            let kept = &mut of_looks.entry(name).or_default().0;
            kept.append(&mut self.unanswered.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_that_have_seen_the_same_have_one_number() {
        let mut claims = Unanswered::default();
        let first = claims.begin(7);
        claims.note_no_reply(first);
        assert_eq!(claims.begin(7), first);
        // The second claim was refused, so the first one may have been granted.
        claims.note_answer(first, false);
        assert!(claims.is_orphan(8, Some(first)));
        claims.strike_off(Some(first));
        assert!(!claims.is_orphan(8, Some(first)));
    }

    #[test]
    fn what_was_answered_is_struck_off() {
        let mut claims = Unanswered::default();
        for was_granted in [true, false] {
            let number = claims.begin(7);
            claims.note_answer(number, was_granted);
            assert!(!claims.is_orphan(8, Some(number)));
        }
        let number = claims.begin(7);
        claims.note_no_reply(number);
        claims.note_answer(number, true);
        assert!(!claims.is_orphan(8, Some(number)));
    }

    #[test]
    fn what_can_be_granted_no_more_is_forgotten() {
        let mut claims = Unanswered::default();
        let number = claims.begin(7);
        claims.note_no_reply(number);
        assert!(!claims.is_orphan(7, None));
        assert!(!claims.is_orphan(8, Some(number + 1)));
        assert!(claims.0.is_empty());
    }
}
