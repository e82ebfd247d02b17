//! What workers inflict on themselves, when they come to it.

use super::Means;
use crate::chance::Chance;
use crate::fault::MISHAPS;

pub(super) fn inject(means: Means<'_>) {
    means.scarcest_first(&MISHAPS, |means, scarcest| {
        // The scarcest may be one that a worker seldom comes to: the others need not wait for it.
        let any = means.random.choice(&MISHAPS).copied();
        let kind = any.filter(|_| means.random.one_in(2)).unwrap_or(scarcest);
        let able = means.crew.able(kind);
        if let Some(worker) = means.random.choice(&able) {
            means.crew.wish(*worker, kind);
        }
        means.pause(40, 120);
    });
}
