//! Networks that lose every packet for a while.

use super::Means;
use crate::fault::{Fault, NETWORKS};

pub(super) fn inject(means: Means<'_>) {
    means.scarcest_first(&NETWORKS, |means, kind| {
        let networks = means.crew.networks();
        let Some(&(worker, network)) = means.random.choice(&networks) else {
            return;
        };
        network.cut();
        // Some cuts are longer than the clients wait for a reply.
        means.pause(300, 2600);
        if kind == Fault::LostNetwork {
            // The data in transit is lost, and with it every connection.
            network.sever();
        }
        network.restore();
        means.ledger.fault(kind, [worker]);
        means.pause(100, 500);
    });
}
