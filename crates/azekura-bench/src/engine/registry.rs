//! From names on the command line to open engines.

use crate::engine::{Engine, Options};
use crate::failure::Result;
use std::path::Path;

/// azekura's tables, and what is compared with peers where nothing else is said.
pub(crate) const OURS: &str = "azekura";

/// azekura's trees in memory.
pub(crate) const OUR_POOLS: &str = "azekura-pmem";

/// Whether an engine is azekura, whichever of its trees: no peer, and answerable for what it promises.
pub(crate) fn is_ours(name: &str) -> bool {
    [OURS, OUR_POOLS].contains(&name)
}

/// Stands for every engine that [`names`] gives.
const ALL: &str = "all";

/// Opens or creates a database in a directory.
type Open = fn(&Path, &Options) -> Result<Box<dyn Engine>>;

/// An engine that the bench knows.
struct Entry {
    name: &'static str,
    /// The feature that compiles it in.
    feature: &'static str,
    /// Left out of `all`: the same engine as another with one option changed.
    variant: bool,
    /// `None` if it is not in this build.
    open: Option<Open>,
}

/// One entry: `$open` is only there if its feature is.
macro_rules! peer {
    ($name:literal, $feature:literal, $variant:literal, $open:path) => {
        Entry {
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

/// Every engine, ours first.
const ENGINES: &[Entry] = &[
    Entry { name: OURS, feature: "", variant: false, open: Some(super::azekura::open) },
    Entry { name: OUR_POOLS, feature: "", variant: false, open: Some(super::azekura::open_pool) },
    peer!("fjall", "fjall", false, super::fjall::open),
    peer!("rocksdb", "rocksdb", false, super::rocksdb::engine::open),
    peer!("rocksdb-hash", "rocksdb", true, super::rocksdb::engine::open_hashed),
    peer!("rocksdb-direct", "rocksdb", true, super::rocksdb::engine::open_direct),
    peer!("heed", "heed", false, super::heed::open),
    peer!("redb", "redb", false, super::redb::open),
    peer!("surrealkv", "surrealkv", false, super::surrealkv::open),
    peer!("sled", "sled", false, super::sled::open),
];

/// The engines that run here, ours first, without variants.
pub(crate) fn names() -> Vec<&'static str> {
    ENGINES.iter().filter(|entry| !entry.variant && usable(entry).is_ok()).map(|entry| entry.name).collect()
}

/// The engines that are asked for; `all` stands for those of [`names`].
pub(crate) fn chosen(asked: &[String]) -> Vec<String> {
    let mut chosen: Vec<String> = Vec::new();
    for name in asked {
        let stands_for = if name == ALL { names() } else { vec![name.as_str()] };
        for name in stands_for {
            if !chosen.iter().any(|known| known == name) {
                chosen.push(name.to_owned());
            }
        }
    }
    chosen
}

/// Says in words why `name` cannot be run here.
pub(crate) fn check(name: &str) -> Result<()> {
    usable(entry(name)?).map(|_| ())
}

/// Opens, or creates, the database of engine `name` in `dir`, which may be missing, at its partition
/// [`super::options::PARTITION`].
pub(crate) fn open(name: &str, dir: &Path, options: &Options) -> Result<Box<dyn Engine>> {
    let open = usable(entry(name)?)?;
    std::fs::create_dir_all(dir)?; // not every peer does
    open(dir, options)
}

fn entry(name: &str) -> Result<&'static Entry> {
    ENGINES
        .iter()
        .find(|entry| entry.name == name)
        .ok_or_else(|| format!("no engine is called `{name}`; this build has {}", names().join(", ")).into())
}

fn usable(entry: &Entry) -> Result<Open> {
    let Entry { name, feature, .. } = entry;
    let open =
        entry.open.ok_or_else(|| format!("`{name}` is not in this build: add `--features {feature}` (or `peers`)"))?;
    #[cfg(feature = "rocksdb")]
    if *feature == "rocksdb" {
        super::rocksdb::library::available()?;
    }
    Ok(open)
}

#[cfg(test)]
mod tests {
    use super::{ENGINES, check, chosen, names};

    #[test]
    fn all_stands_for_what_runs_here_once() {
        let all = chosen(&["azekura".into(), "all".into(), "azekura".into()]);
        assert_eq!(all, names());
        assert!(all.iter().all(|name| check(name).is_ok()), "{all:?}");
        assert!(ENGINES.iter().all(|entry| !entry.variant || !all.iter().any(|name| name == entry.name)));
    }

    #[test]
    fn refusal_says_what_to_do() {
        for entry in ENGINES.iter().filter(|entry| entry.open.is_none()) {
            let error = check(entry.name).unwrap_err().to_string();
            assert!(error.contains(&format!("--features {}", entry.feature)), "{error}");
        }
        assert!(check("nosuchdb").unwrap_err().to_string().contains("azekura"));
    }
}
