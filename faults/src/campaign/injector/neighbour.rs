//! A second server of the workers, which hangs for a while.

use super::Means;
use crate::fault::NEIGHBOURS;

pub(super) fn inject(means: Means<'_>) {
    means.scarcest_first(&NEIGHBOURS, |means, kind| {
        let neighbour = means.crew.neighbour();
        neighbour.cut();
        // Longer than a watch on the first server may be late.
        means.pause(1700, 2600);
        neighbour.sever();
        neighbour.restore();
        means.ledger.fault(kind, []);
        means.pause(200, 600);
    });
}
