//! Engines by name, and the wait until an engine has no background work.

use crate::engine::{Engine, Options};
use crate::error::Result;
use crate::measure::process::Usage;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// azekura with LSM partitions, which is compared with peers.
pub(crate) const OURS: &str = "azekura";
/// azekura with pmem partitions.
pub(crate) const OUR_POOLS: &str = "azekura-pmem";

/// Whether an engine is azekura, with either kind of tree: not a peer, and held to its guarantees.
pub(crate) fn is_ours(name: &str) -> bool {
    [OURS, OUR_POOLS].contains(&name)
}

type OpenFn = fn(&Path, &Options) -> Result<Box<dyn Engine>>;

struct EngineEntry {
    name: &'static str,
    /// The feature that compiles it in.
    feature: &'static str,
    /// Excluded from `all`: another engine with one option changed.
    variant: bool,
    /// `None` if it is not in this build.
    open: Option<OpenFn>,
}

/// One entry; `$open` exists only if its feature is enabled.
macro_rules! peer {
    ($name:literal, $feature:literal, $variant:literal, $open:path) => {
        EngineEntry {
            name: $name,
            feature: $feature,
            variant: $variant,
            #[cfg(feature = $feature)]
            open: Some($open),
            #[cfg(not(feature = $feature))]
            open: None,
        }
    };
}

const ENGINES: &[EngineEntry] = &[
    EngineEntry { name: OURS, feature: "", variant: false, open: Some(super::azekura::open) },
    EngineEntry { name: OUR_POOLS, feature: "", variant: false, open: Some(super::azekura::open_pool) },
    peer!("fjall", "fjall", false, super::fjall::open),
    peer!("rocksdb", "rocksdb", false, super::rocksdb::open),
    peer!("rocksdb-hash", "rocksdb", true, super::rocksdb::open_hashed),
    peer!("rocksdb-direct", "rocksdb", true, super::rocksdb::open_direct),
    peer!("heed", "heed", false, super::heed::open),
    peer!("redb", "redb", false, super::redb::open),
    peer!("surrealkv", "surrealkv", false, super::surrealkv::open),
];

/// Every engine that the bench knows, azekura first, without variants.
pub(crate) fn known() -> impl Iterator<Item = &'static str> {
    ENGINES.iter().filter(|entry| !entry.variant).map(|entry| entry.name)
}

/// The engines that run here, azekura first, without variants.
pub(crate) fn names() -> Vec<&'static str> {
    known().filter(|name| check(name).is_ok()).collect()
}

/// The engines that were asked for, each once; `all` means [`names`].
pub(crate) fn chosen(asked: &[String]) -> Vec<String> {
    let mut chosen: Vec<String> = Vec::new();
    for name in asked {
        let meant = if name == "all" { names() } else { vec![name.as_str()] };
        let new: Vec<&str> = meant.into_iter().filter(|name| !chosen.iter().any(|known| known == name)).collect();
        chosen.extend(new.into_iter().map(str::to_owned));
    }
    chosen
}

/// Returns an error that says why `name` cannot run here, if it cannot.
pub(crate) fn check(name: &str) -> Result<()> {
    usable(name).map(|_| ())
}

/// Opens or creates the database of engine `name` in `dir`, which may be missing, at its partition
/// [`super::api::PARTITION`].
pub(crate) fn open(name: &str, dir: &Path, options: &Options) -> Result<Box<dyn Engine>> {
    let open = usable(name)?;
    std::fs::create_dir_all(dir)?; // some peers do not
    open(dir, options)
}

fn usable(name: &str) -> Result<OpenFn> {
    let known = || ENGINES.iter().map(|entry| entry.name).collect::<Vec<_>>().join(", ");
    let unknown = || format!("no engine is called `{name}`; the bench knows {}", known());
    let EngineEntry { feature, open, .. } = ENGINES.iter().find(|entry| entry.name == name).ok_or_else(unknown)?;
    let absent = || format!("`{name}` is not in this build: add `--features {feature}` (or `peers`)");
    #[cfg(feature = "rocksdb")]
    if *feature == "rocksdb" {
        super::rocksdb::available()?;
    }
    Ok(open.ok_or_else(absent)?)
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
        if busy {
            quiet_since = now.0;
        }
        last = now;
    }
    Ok(Settled { seconds: (quiet_since - start).as_secs_f64(), reached: true })
}

#[cfg(test)]
mod tests {
    use super::{ENGINES, check, chosen, names};

    #[test]
    fn all_means_each_usable_engine_once() {
        let all = chosen(&["azekura".into(), "all".into(), "azekura".into()]);
        assert_eq!(all, names());
        assert!(all.iter().all(|name| check(name).is_ok()), "{all:?}");
        assert!(ENGINES.iter().all(|entry| !entry.variant || !all.iter().any(|name| name == entry.name)));
    }

    #[test]
    fn error_names_the_missing_feature() {
        for entry in ENGINES.iter().filter(|entry| entry.open.is_none()) {
            let error = check(entry.name).unwrap_err().to_string();
            assert!(error.contains(&format!("--features {}", entry.feature)), "{error}");
        }
        assert!(check("nosuchdb").unwrap_err().to_string().contains("azekura"));
    }
}
