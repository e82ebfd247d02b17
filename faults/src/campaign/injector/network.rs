//! Networks that swallow everything for a while.

use super::Means;

#[derive(Debug, Clone, Copy)]
enum Kind {
    /// What was on the way arrives afterwards.
    Late,
    /// What was on the way is lost, and with it every connection.
    Lost,
}

pub(super) fn inject(means: Means<'_>) {
    means.rounds(&[Kind::Late, Kind::Lost], |means, kind| {
        let networks = means.crew.networks();
        let Some(&(worker, network)) = means.random.pick(&networks) else {
            return;
        };
        network.cut();
        means.pause(300, 3000);
        if let Kind::Lost = kind {
            network.sever();
        }
        network.restore();
        let kind = match kind {
            Kind::Late => "cut network, late delivery",
            Kind::Lost => "cut network, lost connections",
        };
        means.ledger.fault(kind, [worker]);
        means.pause(200, 800);
    });
}
