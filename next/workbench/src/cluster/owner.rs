//! The user that a server runs as.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// The user that PostgreSQL's programs must be run as, where it is not the one that runs the tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    uid: u32,
    gid: u32,
}

impl Owner {
    /// `None` for an ordinary user; for root, which PostgreSQL refuses to run as, the user
    /// `postgres` or else `nobody`.
    pub(crate) fn required() -> Option<Self> {
        let output = Command::new("/bin/sh")
            .args(["-c", "PATH=${PATH:+$PATH:}/usr/bin:/bin; id -u"])
            .output()
            .unwrap_or_else(|error| panic!("cannot find out who runs the tests: `id -u`: {error}"));
        if String::from_utf8_lossy(&output.stdout).trim() != "0" {
            return None;
        }
        let accounts = fs::read_to_string("/etc/passwd").unwrap_or_default();
        let owner = ["postgres", "nobody"]
            .iter()
            .find_map(|name| Self::in_accounts(&accounts, name));
        Some(owner.expect(
            "PostgreSQL refuses to run as root, and /etc/passwd has neither a user `postgres` nor a user `nobody` to \
             run it as",
        ))
    }

    /// The user of that name in the text of an `/etc/passwd`.
    fn in_accounts(accounts: &str, name: &str) -> Option<Self> {
        accounts.lines().find_map(|line| {
            let mut fields = line.split(':');
            if fields.next() != Some(name) {
                return None;
            }
            let uid = fields.nth(1)?.parse().ok()?;
            let gid = fields.next()?.parse().ok()?;
            Some(Self { uid, gid })
        })
    }

    /// Makes the command run as this user.
    pub(crate) fn runs(self, command: &mut Command) {
        command.uid(self.uid).gid(self.gid);
    }
}

#[cfg(test)]
mod tests {
    use super::Owner;

    const ACCOUNTS: &str = "root:x:0:0:root:/root:/bin/bash\n\
                            nobody:x:65534:65533:nobody:/nonexistent:/usr/sbin/nologin\n\
                            postgres2:x:7:8::/:/bin/sh\n";

    #[test]
    fn a_user_is_found_by_its_whole_name() {
        assert_eq!(
            Owner::in_accounts(ACCOUNTS, "nobody"),
            Some(Owner {
                uid: 65534,
                gid: 65533
            })
        );
        assert_eq!(Owner::in_accounts(ACCOUNTS, "postgres"), None);
    }
}
