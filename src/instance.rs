//! The name of this process, for operators who look at the database: the pid of a server session
//! does not tell them which client it belongs to.

use std::sync::LazyLock;
use std::{env, fs, process};

/// The host and the pid of this program, such as `web-3 pid 4711`.
pub(crate) fn name() -> &'static str {
    static NAME: LazyLock<String> = LazyLock::new(|| {
        let files = ["/proc/sys/kernel/hostname", "/etc/hostname"].map(fs::read_to_string);
        let variables = ["HOSTNAME", "COMPUTERNAME"].map(env::var);
        let mut names = files
            .into_iter()
            .flatten()
            .chain(variables.into_iter().flatten());
        let host = names
            .find(|name| !name.trim().is_empty())
            .unwrap_or_default();
        format!("{} pid {}", host.trim(), process::id())
            .trim()
            .to_owned()
    });
    &NAME
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_pid_is_that_of_the_program() {
        assert!(super::name().ends_with(&format!("pid {}", std::process::id())));
    }
}
