//! Engines by name, and the wait until an engine has no background work.

use crate::engine::{Engine, Options};
use crate::error::Result;
use crate::measure::process::Usage;
use anyhow::bail;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// azekura with LSM partitions, which is compared with peers.
pub(crate) const OURS: &str = "azekura";
/// azekura with pmem partitions.
pub(crate) const OUR_POOLS: &str = "azekura-pmem";
/// azekura with LSM partitions whose files are mapped for reading and not compressed.
const OUR_MAPPED: &str = "azekura-mapped";

/// Whether an engine is azekura, in any variant: not a peer, and its guarantees are checked.
pub(crate) fn is_ours(name: &str) -> bool {
    [OURS, OUR_POOLS, OUR_MAPPED].contains(&name)
}

type OpenFn = fn(&Path, &Options) -> Result<Box<dyn Engine>>;

/// Every engine that the bench knows, azekura first. Each peer has the name of its feature.
const ENGINES: [&str; 7] = [OURS, OUR_POOLS, "fjall", "rocksdb", "heed", "redb", "surrealkv"];

/// The function that opens an engine; an error that says why it cannot run here.
fn find(name: &str) -> Result<OpenFn> {
    #[cfg(feature = "rocksdb")]
    if name.starts_with("rocksdb") {
        super::rocksdb::api()?;
    }
    let feature = name.split('-').next().unwrap_or(name);
    let open: OpenFn = match name {
        OURS => super::azekura::open,
        OUR_POOLS => super::azekura::open_pool,
        OUR_MAPPED => super::azekura::open_mapped,
        #[cfg(feature = "fjall")]
        "fjall" => super::fjall::open,
        #[cfg(feature = "fjall")]
        "fjall-tx" => super::fjall::open_transactional,
        #[cfg(feature = "rocksdb")]
        "rocksdb" => |dir, options| super::rocksdb::open(dir, options, false, false),
        #[cfg(feature = "rocksdb")]
        "rocksdb-hash" => |dir, options| super::rocksdb::open(dir, options, true, false),
        #[cfg(feature = "rocksdb")]
        "rocksdb-direct" => |dir, options| super::rocksdb::open(dir, options, false, true),
        #[cfg(feature = "heed")]
        "heed" => super::heed::open,
        #[cfg(feature = "redb")]
        "redb" => super::redb::open,
        #[cfg(feature = "surrealkv")]
        "surrealkv" => super::surrealkv::open,
        _ if ENGINES.contains(&feature) => bail!("`{name}` needs `--features {feature}` (or `peers`)"),
        _ => bail!("no engine is called `{name}`; the bench knows {}", ENGINES.join(", ")),
    };
    Ok(open)
}

/// The engines that run here, azekura first, without the variants of Fjall and RocksDB.
pub(crate) fn names() -> Vec<&'static str> {
    ENGINES.into_iter().filter(|name| find(name).is_ok()).collect()
}

/// The engines that were asked for; `all` means [`names`]. An error if one cannot run here.
pub(crate) fn chosen(asked: &[String]) -> Result<Vec<String>> {
    let mut chosen: Vec<String> = Vec::new();
    for name in asked.iter().flat_map(|name| if name == "all" { names() } else { vec![name.as_str()] }) {
        check(name)?;
        if !chosen.iter().any(|one| one == name) {
            chosen.push(name.to_owned());
        }
    }
    Ok(chosen)
}

/// Returns an error that says why `name` cannot run here, if it cannot.
pub(crate) fn check(name: &str) -> Result<()> {
    find(name).map(drop)
}

/// Opens or creates the database of engine `name` in `dir`, which may be missing, at its partition
/// [`super::PARTITION`].
pub(crate) fn open(name: &str, dir: &Path, options: &Options) -> Result<Box<dyn Engine>> {
    std::fs::create_dir_all(dir)?; // some peers do not
    find(name)?(dir, options)
}

const POLL: Duration = Duration::from_millis(25);
/// Bounds of the idle time after which an engine counts as settled.
const QUIET: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(400));
/// Longest wait for an engine to settle.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(600);
/// Share of one CPU below which a process counts as idle.
const IDLE_CPU: f64 = 0.15;

/// How an engine settled.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Settled {
    /// Seconds until the idle time began.
    pub(crate) seconds: f64,
    /// Whether it settled at all.
    pub(crate) reached: bool,
}

/// Flushes all partitions of a database, then waits until the engine reports no work, writes nothing and uses no CPU
/// for a quarter of the time it worked, within [`QUIET`].
pub(crate) fn settle(partitions: &[&dyn Engine], worked: Duration) -> Result<Settled> {
    let start = Instant::now();
    partitions.iter().try_for_each(|partition| partition.flush())?;
    let quiet = (worked / 4).clamp(QUIET.0, QUIET.1);
    let mut quiet_since = Instant::now();
    let mut last = (Instant::now(), Usage::now());
    while quiet_since.elapsed() < quiet {
        if start.elapsed() > SETTLE_TIMEOUT {
            return Ok(Settled { seconds: start.elapsed().as_secs_f64(), reached: false });
        }
        sleep(POLL);
        let now = (Instant::now(), Usage::now());
        let used = now.1 - last.1;
        let mut busy = used.syscall_write_bytes > 0 || used.cpu_s / (now.0 - last.0).as_secs_f64() > IDLE_CPU;
        for partition in partitions {
            busy |= partition.busy()?;
        }
        quiet_since = if busy { now.0 } else { quiet_since };
        last = now;
    }
    Ok(Settled { seconds: (quiet_since - start).as_secs_f64(), reached: true })
}

#[cfg(test)]
mod tests {
    use super::{ENGINES, check, chosen, names};

    #[test]
    fn all_means_each_usable_engine_once() {
        let all = chosen(&["azekura".into(), "all".into(), "azekura".into()]).unwrap();
        assert_eq!(all, names());
        assert!(all.iter().all(|name| check(name).is_ok()), "{all:?}");
        assert!(all.iter().all(|name| !name.starts_with("rocksdb-")), "{all:?}");
    }

    #[test]
    fn error_names_the_missing_feature() {
        for name in ENGINES.iter().chain(&["rocksdb-hash"]) {
            let feature = name.split('-').next().unwrap();
            let message = check(name).map_or_else(|error| error.to_string(), |()| String::new());
            assert!(
                message.is_empty() || message.contains(&format!("--features {feature}")) || message.contains("install"),
                "{message}"
            );
        }
        assert!(check("nosuchdb").unwrap_err().to_string().contains("azekura"));
    }
}
