//! A Redis server of its own.

use std::fs;
use std::io::Read;
use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::server::Transport;

/// A throwaway Redis. It goes away with the value, or with the process that started it: the shell that owns it notices
/// the end of its standard input.
pub(crate) struct RedisServer {
    shell: Child,
    client: redis::Client,
}

const WATCHER: &str = r#"
trap '' HUP INT TERM
program=$1; directory=$2; shift 2
"$program" --dir "$directory" "$@" </dev/null >"$directory/redis.log" 2>&1 &
pid=$!
read -r _
kill "$pid"
wait "$pid"
rm -rf "$directory"
"#;

impl RedisServer {
    /// Starts a server as Debian's package configures it, but for its port and its directory, and for `settings`.
    pub(crate) fn start(transport: Transport, settings: &[&str]) -> Self {
        let number = fastrand::u64(..);
        let directory = std::env::temp_dir().join(format!("interlock-redis-{number:016x}"));
        fs::create_dir(&directory).expect("the directory for temporary files can be written");
        let mut arguments = vec!["--save".to_owned(), "3600 1 300 100 60 10000".to_owned()];
        let url = match transport {
            Transport::Tcp => {
                let port = free_port();
                arguments.extend(
                    ["--bind", "127.0.0.1", "--port", &port.to_string()].map(str::to_owned),
                );
                format!("redis://127.0.0.1:{port}")
            }
            Transport::Socket => {
                let socket = directory.join("socket").display().to_string();
                arguments.extend(["--port", "0", "--unixsocket", &socket].map(str::to_owned));
                format!("redis+unix://{socket}")
            }
        };
        arguments.extend(settings.iter().map(|&setting| setting.to_owned()));
        let shell = Command::new("/bin/sh")
            .args(["-c", WATCHER, "redis", "redis-server"])
            .arg(&directory)
            .args(&arguments)
            .env("PATH", path())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("/bin/sh can be started");
        let client = redis::Client::open(url).expect("a URL of Redis");
        let server = Self { shell, client };
        server.wait_until_it_replies(&directory);
        server
    }

    pub(crate) fn connect(&self) -> redis::Connection {
        self.client
            .get_connection()
            .expect("Redis accepts connections")
    }

    pub(crate) fn version(&self) -> String {
        let information: String = redis::cmd("INFO")
            .arg("server")
            .query(&mut self.connect())
            .expect("Redis replies");
        let line = information
            .lines()
            .find_map(|line| line.strip_prefix("redis_version:"));
        line.unwrap_or("unknown").trim().to_owned()
    }

    fn wait_until_it_replies(&self, directory: &Path) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while let Err(error) = self.client.get_connection() {
            let mut log = String::new();
            if let Ok(mut file) = fs::File::open(directory.join("redis.log")) {
                let _ = file.read_to_string(&mut log);
            }
            assert!(
                Instant::now() < deadline,
                "redis-server does not reply: {error}\n{log}\nscripts/install redis installs it"
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        drop(self.shell.stdin.take());
        let _ = self.shell.wait();
    }
}

fn path() -> String {
    format!(
        "{}:/usr/sbin:/usr/bin:/bin",
        std::env::var("PATH").unwrap_or_default()
    )
}

/// A port that nobody listens on now.
pub(crate) fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .expect("the loopback interface has a free port");
    listener
        .local_addr()
        .expect("a listener has an address")
        .port()
}
