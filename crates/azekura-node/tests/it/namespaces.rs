//! Network namespaces, one for each node, on a bridge: nodes that run but cannot reach each other.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// Namespaces with the addresses 10.A.B.1 and so on. The processes of this machine have 10.A.B.254.
pub(crate) struct Namespaces {
    name: String,
    subnet: String,
    count: u64,
}

fn ip(arguments: &str) -> Result<(), String> {
    let output = Command::new("ip").args(arguments.split(' ')).output().map_err(|error| error.to_string())?;
    let problem = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(format!("ip {arguments}: {problem}")) }
}

/// Removes the namespaces and bridges of processes that ended without doing so.
fn remove_abandoned() {
    let pid_of = |name: &str| name.strip_prefix("azk")?.split('x').next()?.parse::<u32>().ok();
    let is_over = |pid: u32| !Path::new(&format!("/proc/{pid}")).exists();
    let names = |dir: &str| {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect::<Vec<_>>()
    };
    for name in names("/run/netns").iter().filter(|name| pid_of(name).is_some_and(is_over)) {
        let _ = ip(&format!("netns del {name}"));
    }
    for name in names("/sys/class/net").iter().filter(|name| pid_of(name).is_some_and(is_over)) {
        let _ = ip(&format!("link del {name}"));
    }
}

impl Namespaces {
    /// # Errors
    /// If the process has no right to make namespaces.
    pub(crate) fn new(count: u64) -> Result<Namespaces, String> {
        remove_abandoned();
        // Tests of one process run at the same time, at most four of them with namespaces.
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let (pid, number) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let subnet = (pid % 15_000) * 4 + number;
        let subnet = format!("10.{}.{}", 10 + subnet / 250, subnet % 250);
        let namespaces = Namespaces { name: format!("azk{pid}x{number}"), subnet, count };
        namespaces.set_up()?;
        Ok(namespaces)
    }

    fn set_up(&self) -> Result<(), String> {
        let Namespaces { name, subnet, count } = self;
        ip(&format!("link add {name}b type bridge"))?;
        ip(&format!("addr add {subnet}.254/24 dev {name}b"))?;
        ip(&format!("link set {name}b up"))?;
        for id in 1..=*count {
            ip(&format!("netns add {name}-{id}"))?;
            ip(&format!("link add {name}v{id} type veth peer name eth0 netns {name}-{id}"))?;
            ip(&format!("link set {name}v{id} master {name}b up"))?;
            ip(&format!("-n {name}-{id} addr add {subnet}.{id}/24 dev eth0"))?;
            ip(&format!("-n {name}-{id} link set eth0 up"))?;
            ip(&format!("-n {name}-{id} link set lo up"))?;
        }
        Ok(())
    }

    pub(crate) fn host(&self, id: u64) -> String {
        format!("{}.{id}", self.subnet)
    }

    /// What runs a command in the namespace of a node.
    pub(crate) fn prefix(&self, id: u64) -> [String; 4] {
        ["ip".into(), "netns".into(), "exec".into(), format!("{}-{id}", self.name)]
    }

    /// Cuts a node off from everything else.
    pub(crate) fn cut(&self, id: u64) {
        ip(&format!("link set {}v{id} down", self.name)).unwrap();
    }

    pub(crate) fn heal(&self, id: u64) {
        ip(&format!("link set {}v{id} up", self.name)).unwrap();
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for id in 1..=self.count {
            let _ = ip(&format!("netns del {}-{id}", self.name));
        }
        let _ = ip(&format!("link del {}b", self.name));
    }
}
