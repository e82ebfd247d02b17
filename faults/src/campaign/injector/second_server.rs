//! A second server of the workers, which hangs for a while.

use super::Injector;
use crate::fault::SECOND_SERVER;

pub(super) fn inject(injector: Injector<'_>) {
    injector.scarcest_first(&SECOND_SERVER, |injector, kind| {
        let second_server = injector.workers.second_server();
        second_server.cut();
        // Longer than a watch on the first server may be late.
        injector.pause(1700, 2600);
        second_server.sever();
        second_server.restore();
        injector.log.fault(kind, []);
        injector.pause(200, 600);
    });
}
