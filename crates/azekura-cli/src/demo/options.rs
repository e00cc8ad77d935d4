//! What can be asked of the demo, and its fixed sizes.

use std::path::{Path, PathBuf};

use azekura::{Config, Database, Partition, PartitionCreateOptions};
use clap::Args;

use crate::failure::Result;

/// Larger files are left out: a value is held in memory as a whole, and the demo promises to need little.
pub(crate) const FILE_BYTES_MAX: u64 = 64 << 20;

/// The demo takes no more than this, so that it ends within its time and fits a temporary directory.
pub(crate) const INPUT_BYTES_MAX: u64 = 2 << 30;

/// Inputs below this are filled up with generated versions.
pub(crate) const INPUT_BYTES_ENOUGH: u64 = 256 << 20;

/// Arguments of `demo`.
#[derive(Args, Debug)]
pub(crate) struct DemoArgs {
    /// The directory whose files are taken [default: the current one, without `target` and `.git`].
    pub(crate) dir: Option<PathBuf>,
    /// Keep the database in this new or empty directory [default: a temporary one, removed at the end].
    #[arg(long, value_name = "PATH")]
    pub(crate) db: Option<PathBuf>,
    /// About how long it may take; files that do not fit into it are not taken, and the report says so.
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u64).range(5..=3600))]
    pub(crate) seconds: u64,
    /// How much is collected in memory before a table is written. Small ones give two levels from little input.
    #[arg(long, hide = true, value_name = "BYTES", default_value_t = 16 << 20)]
    pub(crate) memtable_bytes: u64,
}

/// Arguments of the hidden writer.
#[derive(Args, Debug)]
pub(crate) struct WriterArgs {
    #[arg(long)]
    pub(crate) db: PathBuf,
    #[arg(long)]
    pub(crate) plan: PathBuf,
    #[arg(long)]
    pub(crate) root: PathBuf,
    /// What stands between a path and its version.
    #[arg(long)]
    pub(crate) marker: String,
    /// Files in the plan.
    #[arg(long)]
    pub(crate) files: u64,
    /// The first job to do.
    #[arg(long)]
    pub(crate) start: u64,
    /// Write generated versions until two levels exist.
    #[arg(long)]
    pub(crate) fill: bool,
    /// Stop writing after this time.
    #[arg(long)]
    pub(crate) milliseconds: u64,
    /// At the end, wait for the kill instead of closing.
    #[arg(long)]
    pub(crate) until_killed: bool,
    #[arg(long)]
    pub(crate) memtable_bytes: u64,
}

/// The demo's database and its one partition; the same settings for every process that opens it.
pub(crate) fn open(path: &Path, memtable_bytes: u64) -> Result<(Database, Partition)> {
    let db = Config::new(path).open()?;
    let options = PartitionCreateOptions::default().max_memtable_size(memtable_bytes);
    let partition = db.open_partition("default", options)?;
    Ok((db, partition))
}
