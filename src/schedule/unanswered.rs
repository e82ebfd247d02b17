//! Claims of ticks whose reply was lost. The next look recognizes its own orphan, and gives it back, so that it is no attempt.

use std::sync::Mutex;

use crate::alarm::lock;
use crate::lease::claim_number;

/// The numbers of a loop's claims that have no reply. Of this loop alone: another one of the process may run the tick of its own claim.
#[derive(Debug, Default)]
pub(super) struct Unanswered(Vec<Claim>);

#[derive(Debug)]
struct Claim {
    /// The token that the claim has seen. All claims that have seen the same one have the same number, because at most one of them is
    /// granted.
    seen: i64,
    number: i64,
    /// Whether a claim with this number is known to have no reply.
    has_no_reply: bool,
}

impl Unanswered {
    /// The number of a claim that is about to be sent.
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

    /// The claim was answered. One before it with the same number may still be an orphan, unless this one was granted.
    pub(super) fn answered(&mut self, number: i64, was_granted: bool) {
        self.0
            .retain(|claim| claim.number != number || claim.has_no_reply && !was_granted);
    }

    /// The claim was sent, perhaps, and has no reply.
    pub(super) fn no_reply(&mut self, number: i64) {
        for claim in &mut self.0 {
            claim.has_no_reply |= claim.number == number;
        }
    }

    /// Whether the last claim of the row is an orphan of these. Forgets those that can be granted no more, because the row has another
    /// token than they have seen.
    pub(super) fn is_orphan(&mut self, token: i64, number: Option<i64>) -> bool {
        let is_orphan = |claim: &Claim| Some(claim.number) == number;
        self.0
            .retain(|claim| claim.seen == token || is_orphan(claim));
        self.0.iter().any(is_orphan)
    }

    /// The orphan was given back.
    pub(super) fn strike_off(&mut self, number: Option<i64>) {
        self.0.retain(|claim| Some(claim.number) != number);
    }
}

/// The claims of a handle's single looks. A look takes them, so that another one at the same time does not take its claim for an orphan.
#[derive(Debug)]
pub(super) struct OfHandle(Mutex<Unanswered>);

impl OfHandle {
    pub(super) const fn new() -> Self {
        Self(Mutex::new(Unanswered(Vec::new())))
    }

    pub(super) fn take(&self) -> Taken<'_> {
        Taken(self, std::mem::take(&mut *lock(&self.0)))
    }
}

/// Those of a handle, which its drop puts back, except those of a dropped future: their claims are given back in the background.
pub(super) struct Taken<'a>(&'a OfHandle, pub(super) Unanswered);

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        let unanswered = self.1.0.drain(..).filter(|claim| claim.has_no_reply);
        lock(&self.0.0).0.extend(unanswered);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_that_have_seen_the_same_have_one_number() {
        let mut claims = Unanswered::default();
        let first = claims.begin(7);
        claims.no_reply(first);
        assert_eq!(claims.begin(7), first);
        // The second was refused, so the first one may have been granted.
        claims.answered(first, false);
        assert!(claims.is_orphan(8, Some(first)));
        claims.strike_off(Some(first));
        assert!(!claims.is_orphan(8, Some(first)));
    }

    #[test]
    fn what_was_answered_is_struck_off() {
        let mut claims = Unanswered::default();
        for was_granted in [true, false] {
            let number = claims.begin(7);
            claims.answered(number, was_granted);
            assert!(!claims.is_orphan(8, Some(number)));
        }
        let number = claims.begin(7);
        claims.no_reply(number);
        claims.answered(number, true);
        assert!(!claims.is_orphan(8, Some(number)));
    }

    #[test]
    fn what_can_be_granted_no_more_is_forgotten() {
        let mut claims = Unanswered::default();
        let number = claims.begin(7);
        claims.no_reply(number);
        assert!(!claims.is_orphan(7, None));
        assert!(!claims.is_orphan(8, Some(number + 1)));
        assert!(claims.0.is_empty());
    }
}
