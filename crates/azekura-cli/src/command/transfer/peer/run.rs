//! The import of a database of another engine: opens it, selects tables, checks all entries, and stores them.

use std::any::Any;
use std::collections::BTreeSet;
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;

use azekura::PartitionCreateOptions;

use crate::args::{ImportArgs, PeerEngine};
use crate::command::transfer::loader::{EntryLoader, LoadMode};
#[cfg(feature = "import-lmdb")]
use crate::command::transfer::peer::check_process;
#[cfg(feature = "import-fjall")]
use crate::command::transfer::peer::fjall_source;
#[cfg(feature = "import-leveldb")]
use crate::command::transfer::peer::leveldb_source;
#[cfg(feature = "import-lmdb")]
use crate::command::transfer::peer::lmdb_source;
#[cfg(feature = "import-redb")]
use crate::command::transfer::peer::redb_source;
#[cfg(feature = "import-rocksdb")]
use crate::command::transfer::peer::rocksdb_source;
#[cfg(feature = "import-sled")]
use crate::command::transfer::peer::sled_source;
use crate::command::transfer::peer::source::{PeerSource, SourceTable};
use crate::command::transfer::report::TransferReport;
use crate::error::{CliError, Result};
use crate::partition_options::partition_name;
use crate::progress::ProgressReporter;
use crate::{encoding, interrupt};

/// Number of bytes of a key in an error message.
const KEY_SHOWN: usize = 100;

/// Checks the database of `engine`, and stores it unless this is a dry run.
pub(in crate::command::transfer) fn import(
    engine: PeerEngine,
    args: &ImportArgs,
    db: &Path,
    json: bool,
) -> Result<TransferReport> {
    // A temporary copy and new partitions are removed after Ctrl-C.
    interrupt::catch_first()?;
    let nothing_stored = |error: CliError| error.with_note("nothing was stored");
    #[cfg(feature = "import-lmdb")]
    let checked_elsewhere = match engine == PeerEngine::Lmdb && !args.in_process {
        true => Some(check_process::check(args).map_err(nothing_stored)?),
        false => None,
    };
    #[cfg(not(feature = "import-lmdb"))]
    let checked_elsewhere: Option<TransferReport> = None;
    if let (Some(report), true) = (&checked_elsewhere, args.dry_run) {
        return Ok(TransferReport { entries: report.entries, bytes: report.bytes, ..TransferReport::default() });
    }
    let source = caught(engine, &args.source, || open(engine, args)).map_err(nothing_stored)?;
    let import = PeerImport { engine, args, db, json, source: &*source };
    let tables = import.selected_tables().map_err(nothing_stored)?;
    if checked_elsewhere.is_none() {
        let report = import.check(&tables).map_err(if args.in_process { |error| error } else { nothing_stored })?;
        if args.dry_run {
            return Ok(report);
        }
    }
    import.store(&tables)
}

/// Opens the database with the library of its engine, without changing it.
fn open(engine: PeerEngine, args: &ImportArgs) -> Result<Box<dyn PeerSource>> {
    let path = &*args.source;
    match engine {
        #[cfg(feature = "import-fjall")]
        PeerEngine::Fjall => fjall_source::open(path, args.allow_torn_log),
        #[cfg(feature = "import-leveldb")]
        PeerEngine::Leveldb => leveldb_source::open(path),
        #[cfg(feature = "import-lmdb")]
        PeerEngine::Lmdb => lmdb_source::open(path),
        #[cfg(feature = "import-redb")]
        PeerEngine::Redb => redb_source::open(path),
        #[cfg(feature = "import-rocksdb")]
        PeerEngine::Rocksdb => rocksdb_source::open(path),
        #[cfg(feature = "import-sled")]
        PeerEngine::Sled => sled_source::open(path, args.allow_torn_log),
        #[allow(unreachable_patterns, reason = "with all features, every engine has an arm above")]
        other => Err(CliError::without_importer(&other.name())),
    }
}

/// Runs `read`, and turns a panic of the library into an error: some libraries panic on damaged files, also in threads
/// of their own, whose messages are hidden.
fn caught<T>(engine: PeerEngine, path: &Path, read: impl FnOnce() -> Result<T>) -> Result<T> {
    let hook = panic::take_hook();
    panic::set_hook(Box::new(|_| {}));
    let result = panic::catch_unwind(AssertUnwindSafe(read));
    panic::set_hook(hook);
    result.unwrap_or_else(|payload| {
        let text = panic_text(&*payload);
        let message = format!("the library of {} failed, probably on damaged data: {text}", engine.name());
        Err(CliError::input(path, message))
    })
}

fn panic_text(payload: &dyn Any) -> String {
    let text = payload.downcast_ref::<String>().map(String::as_str).or(payload.downcast_ref::<&str>().copied());
    text.unwrap_or("a panic without a message").lines().next().unwrap_or_default().to_string()
}

struct PeerImport<'a> {
    engine: PeerEngine,
    args: &'a ImportArgs,
    db: &'a Path,
    json: bool,
    source: &'a dyn PeerSource,
}

impl PeerImport<'_> {
    /// The tables to import. Their partitions have valid and different names.
    fn selected_tables(&self) -> Result<Vec<SourceTable>> {
        let path = &*self.args.source;
        let mut tables = caught(self.engine, path, || self.source.tables())?;
        let all: Vec<_> = tables.iter().map(|table| table.name.clone()).collect();
        if let Some(missing) = self.args.table.iter().find(|wanted| !all.contains(wanted)) {
            let others =
                if all.is_empty() { "there are none".into() } else { format!("there are: {}", all.join(", ")) };
            return Err(CliError::input(path, format!("no table is named \"{missing}\"; {others}")));
        }
        if !self.args.table.is_empty() {
            tables.retain(|table| self.args.table.contains(&table.name));
        } else if tables.len() > 1 {
            let mut nonempty = Vec::new();
            for table in tables {
                if !table.is_implicit || !self.is_empty(&table)? {
                    nonempty.push(table);
                }
            }
            tables = nonempty;
        }
        if let Some(name) = &self.args.partition {
            match &mut *tables {
                [] => {}
                [table] => table.partition.clone_from(name),
                _ => {
                    let message = format!("--partition takes one table; choose it with --table: {}", all.join(", "));
                    return Err(CliError::input(path, message));
                }
            }
        }
        let mut partitions = BTreeSet::new();
        for SourceTable { name, partition, refusal, .. } in &tables {
            if let Some(reason) = refusal {
                let hint = if all.len() > 1 { "; choose other tables with --table" } else { "" };
                return Err(CliError::input(path, format!("table \"{name}\" cannot be imported: {reason}{hint}")));
            }
            let hint = "choose the table with --table and its partition with --partition";
            partition_name(partition)
                .map_err(|reason| CliError::input(path, format!("table \"{name}\": {reason}; {hint}")))?;
            if !partitions.insert(partition) {
                return Err(CliError::input(path, format!("two tables would be partition \"{partition}\"; {hint}")));
            }
        }
        Ok(tables)
    }

    /// Whether the table has no entries.
    fn is_empty(&self, table: &SourceTable) -> Result<bool> {
        let mut empty = true;
        // The error only ends the read.
        let first = |empty: &mut bool| {
            *empty = false;
            Err(CliError::interrupted())
        };
        let read = caught(self.engine, &self.args.source, || self.source.read(table, &mut |_, _| first(&mut empty)));
        if empty { read.map(|()| true) } else { Ok(false) }
    }

    /// Reads all entries. Fails if one exceeds the limits of a database.
    fn check(&self, tables: &[SourceTable]) -> Result<TransferReport> {
        let mut loader = self.loader(LoadMode::Check, "Checking");
        self.load(tables, &mut loader)?;
        loader.finish()
    }

    /// Stores all entries. After a failure the partitions that it created are deleted.
    fn store(&self, tables: &[SourceTable]) -> Result<TransferReport> {
        let mut loader = self.loader(LoadMode::Store, "Importing");
        if tables.is_empty() {
            return Ok(loader.report);
        }
        let loaded = self.load(tables, &mut loader);
        let error = match loaded {
            Ok(()) => return loader.finish(),
            Err(error) => error,
        };
        Err(match loader.abandon() {
            Ok(false) => error.with_note("nothing was stored"),
            Ok(true) => error.with_note("entries before it were stored in partitions that existed before"),
            Err(_) => error.with_note("the partitions that the import created could not be removed"),
        })
    }

    fn loader(&self, mode: LoadMode, label: &'static str) -> EntryLoader<'_> {
        EntryLoader::new(self.db, "default", mode, ProgressReporter::spinner(self.json, label))
    }

    fn load(&self, tables: &[SourceTable], loader: &mut EntryLoader<'_>) -> Result<()> {
        for table in tables {
            loader.begin_partition(&table.partition, PartitionCreateOptions::default())?;
            loader.progress.message(&*table.name);
            let mut visit = |key: &[u8], value: &[u8]| {
                interrupt::check()?;
                loader.progress.add(1);
                let name = || format!("table \"{}\", key {}", table.name, shown(key));
                loader.put(key, value, name)?;
                match loader.report.skipped.first() {
                    Some((name, reason)) => Err(CliError::input(&self.args.source, format!("{name}: {reason}"))),
                    None => Ok(()),
                }
            };
            caught(self.engine, &self.args.source, || self.source.read(table, &mut visit))?;
        }
        Ok(())
    }
}

/// The key as text, shortened.
fn shown(key: &[u8]) -> String {
    let end = if key.len() > KEY_SHOWN { "…" } else { "" };
    format!("{}{end}", encoding::escaped(&key[..key.len().min(KEY_SHOWN)]))
}
