//! A server, a router and the clients' host, in network namespaces.

use std::process::Command;

pub(crate) const SERVER: &str = "10.99.1.1";
pub(crate) const CLIENTS: &str = "clients";
const CLIENT: &str = "10.99.2.1";
const ROUTER: &str = "router";

/// The route from this namespace, the server's, over the router to the clients' host. It ends with the namespaces, which
/// end with the processes in them.
#[derive(Debug)]
pub(crate) struct Network(());

impl Network {
    pub(crate) fn make() -> Self {
        for command in [
            "ip link set lo up",
            "ip netns add router",
            "ip netns add clients",
            "ip link add server type veth peer name to-server netns router",
            "ip -n router link add to-clients type veth peer name client netns clients",
            "ip addr add 10.99.1.1/24 dev server",
            "ip -n router addr add 10.99.1.2/24 dev to-server",
            "ip -n router addr add 10.99.2.2/24 dev to-clients",
            "ip -n clients addr add 10.99.2.1/24 dev client",
            "ip link set server up",
            "ip -n router link set to-server up",
            "ip -n router link set to-clients up",
            "ip -n clients link set client up",
            "ip route add default via 10.99.1.2",
            "ip -n clients route add default via 10.99.2.2",
            "ip netns exec router sysctl -qw net.ipv4.ip_forward=1",
        ] {
            run(command);
        }
        Self(())
    }

    /// Makes the router lose every packet in both directions without a reply.
    pub(crate) fn swallow(&self) {
        for host in [CLIENT, SERVER] {
            run(&format!("ip -n {ROUTER} route add blackhole {host}/32"));
        }
    }
}

fn run(command: &str) {
    let mut words = command.split_whitespace();
    let status = Command::new(words.next().unwrap_or_default())
        .args(words)
        .status();
    assert!(
        status.as_ref().is_ok_and(|status| status.success()),
        "{command}: {status:?}"
    );
}
