//! Networks that lose every packet for a while.

use super::Injector;
use crate::fault::{Fault, NETWORKS};

pub(super) fn inject(injector: Injector<'_>) {
    injector.scarcest_first(&NETWORKS, |injector, kind| {
        let networks = injector.workers.networks();
        let Some(&(worker, network)) = injector.random.choice(&networks) else {
            return;
        };
        network.cut();
        // Some cuts are longer than the clients wait for a reply.
        injector.pause(300, 2600);
        if kind == Fault::LostNetwork {
            // The data in transit is lost, and with it every connection.
            network.sever();
        }
        network.restore();
        injector.log.fault(kind, [worker]);
        injector.pause(100, 500);
    });
}
