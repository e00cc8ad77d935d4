//! The commands `import` and `export`: format, source and target of a transfer.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use azekura::Database;

use crate::args::{CsvArgs, ExportArgs, ImportArgs, PeerEngine, TransferFormat};
use crate::command::transfer::loader::{EntryLoader, LoadMode};
use crate::command::transfer::native::{self, NativeSelection};
#[cfg(feature = "_peer")]
use crate::command::transfer::peer;
use crate::command::transfer::report::{ImportError, TransferReport};
use crate::command::transfer::text_fields::OutputEncodings;
use crate::command::transfer::writer::ExportWriter;
use crate::command::transfer::{csv_format, directory, json_lines};
use crate::error::{CliError, CommandOutcome, Result};
use crate::interrupt;
use crate::open;
use crate::output::CommandOutput;
use crate::progress::ProgressReporter;

/// Name of the partition unless `--partition` is given.
const DEFAULT_PARTITION: &str = "default";

/// Size of the buffer of an input, in bytes.
const BUFFER_BYTES: usize = 256 << 10;

/// Stores a directory or a file in the database.
pub(crate) fn import(args: &ImportArgs, db: &Path, output: &mut CommandOutput) -> Result<CommandOutcome> {
    if let Some(engine) = args.from {
        return import_from(engine, args, db, output);
    }
    interrupt::catch_first()?;
    let source = &*args.source;
    let is_dir = args.format.map_or(source.is_dir(), |format| format == TransferFormat::Dir);
    let mode = if args.dry_run { LoadMode::Check } else { LoadMode::Store };
    let report = if is_dir {
        let name = args.partition.as_deref().unwrap_or(DEFAULT_PARTITION);
        let progress = ProgressReporter::spinner(output.json(), "Importing");
        let mut loader = EntryLoader::new(db, name, mode, progress);
        let read = directory::import(source, db, &mut loader).map_err(ImportError::from);
        finish_import(read, source, loader)?
    } else {
        // What can be read twice is checked first, so that bad input changes nothing.
        if !args.dry_run && source.is_file() {
            import_stream(args, db, LoadMode::Check, output.json())?;
        }
        import_stream(args, db, mode, output.json())?
    };
    report.print(if args.dry_run { "can be stored" } else { "stored" }, args.errors.all_errors, output)
}

/// Stores a database of another engine.
#[cfg(feature = "_peer")]
fn import_from(engine: PeerEngine, args: &ImportArgs, db: &Path, output: &mut CommandOutput) -> Result<CommandOutcome> {
    let report = peer::import(engine, args, db, output.json())?;
    report.print(if args.dry_run { "can be stored" } else { "stored" }, args.errors.all_errors, output)
}

/// No importer is built in.
#[cfg(not(feature = "_peer"))]
fn import_from(engine: PeerEngine, _: &ImportArgs, _: &Path, _: &mut CommandOutput) -> Result<CommandOutcome> {
    Err(CliError::without_importer(&engine.name()))
}

/// Reads the source once.
fn import_stream(args: &ImportArgs, db: &Path, mode: LoadMode, json: bool) -> Result<TransferReport> {
    let source = &*args.source;
    let (input, length, is_native) = open_source(source)?;
    let format = args.format.unwrap_or_else(|| match is_native {
        true => TransferFormat::Native,
        false if has_extension(source, &["csv"]) => TransferFormat::Csv,
        false => TransferFormat::Jsonl,
    });
    if is_native && format != TransferFormat::Native {
        return Err(CliError::input(source, "this is a native export; import it with --format native"));
    }
    if format == TransferFormat::Native
        && (args.encodings.key_encoding.is_some() || args.encodings.value_encoding.is_some())
    {
        return Err(encodings_without_text());
    }
    check_csv_options(&args.csv, format)?;
    let label = if mode == LoadMode::Check { "Checking" } else { "Importing" };
    let name = args.partition.as_deref().unwrap_or(DEFAULT_PARTITION);
    let mut loader = EntryLoader::new(db, name, mode, ProgressReporter::bytes(json, length, label));
    let read = match format {
        TransferFormat::Csv => csv_format::import(input, source, args.encodings, &args.csv, &mut loader),
        TransferFormat::Jsonl | TransferFormat::Dir => json_lines::import(input, source, args.encodings, &mut loader),
        TransferFormat::Native => {
            let selection =
                NativeSelection { partition: args.partition.as_deref(), ignore_options: args.ignore_options };
            native::import(input, source, selection, &mut loader)
        }
    };
    finish_import(read, source, loader)
}

/// Closes the database. The error of an import states how much was stored.
fn finish_import(read: Result<(), ImportError>, source: &Path, mut loader: EntryLoader<'_>) -> Result<TransferReport> {
    match read.and_then(|()| loader.commit().map_err(ImportError::from)) {
        Ok(()) => loader.finish(),
        Err(error) => {
            let stored = loader.finish_after_error();
            Err(error.into_cli_error(source, stored))
        }
    }
}

/// The input, its length or 0, and whether it begins as a native export.
fn open_source(source: &Path) -> Result<(Box<dyn BufRead>, u64, bool)> {
    let (mut input, length): (Box<dyn BufRead>, u64) = if source == Path::new("-") {
        (Box::new(io::stdin().lock()), 0)
    } else {
        let file = File::open(source).map_err(|e| CliError::os("open the input", source, e))?;
        let length = file.metadata().map_or(0, |data| data.len());
        (Box::new(BufReader::with_capacity(BUFFER_BYTES, file)), length)
    };
    let mut start = Vec::new();
    let read = input.by_ref().take(native::MAGIC.len() as u64).read_to_end(&mut start);
    read.map_err(|e| CliError::os("read the input", source, e))?;
    let is_native = start == native::MAGIC;
    Ok((Box::new(io::Cursor::new(start).chain(input)), length, is_native))
}

/// Writes a partition or the database to a directory, a file or standard output.
pub(crate) fn export(args: &ExportArgs, db: &Path, output: &mut CommandOutput) -> Result<CommandOutcome> {
    let target = &*args.target;
    let to_stdout = target == Path::new("-");
    let format = args.format.unwrap_or_else(|| {
        if to_stdout || has_extension(target, &["jsonl", "ndjson", "json"]) {
            TransferFormat::Jsonl
        } else if has_extension(target, &["csv"]) {
            TransferFormat::Csv
        } else if has_extension(target, &["azk"]) {
            TransferFormat::Native
        } else {
            TransferFormat::Dir
        }
    });
    let is_text = matches!(format, TransferFormat::Csv | TransferFormat::Jsonl);
    if !is_text && (args.encodings.key_encoding.is_some() || args.encodings.value_encoding.is_some()) {
        return Err(encodings_without_text());
    }
    check_csv_options(&args.csv, format)?;
    interrupt::catch_first()?;
    let json = output.json();
    let opened = open::open_to_read(db, json)?;
    let database = &opened.db;
    let name = args.partition.as_deref();
    let report = if format == TransferFormat::Dir {
        if to_stdout {
            return Err(CliError::usage("a directory cannot be written to standard output"));
        }
        let partition = open::existing_partition(database, name.unwrap_or(DEFAULT_PARTITION))?;
        directory::export(&partition, target, json)?
    } else if format == TransferFormat::Native {
        let names = names_to_export(database, name)?;
        let mut out = ExportWriter::open(target, output)?;
        let progress =
            ProgressReporter::entries(json || out.is_terminal(), approximate_len(database, &names), "Exporting");
        let written = native::export(database, &names, &mut out, &progress);
        out.finish(written)?
    } else {
        let partition = open::existing_partition(database, name.unwrap_or(DEFAULT_PARTITION))?;
        let mut out = ExportWriter::open(target, output)?;
        let written = export_text(&partition, format, args, &mut out, json);
        out.finish(written)?
    };
    opened.print_lag(json);
    if to_stdout {
        return Ok(report.print_skipped(args.errors.all_errors, json));
    }
    report.print("written", args.errors.all_errors, output)
}

fn export_text(
    partition: &azekura::Partition,
    format: TransferFormat,
    args: &ExportArgs,
    out: &mut ExportWriter<'_>,
    json: bool,
) -> Result<TransferReport> {
    let bar = |label| ProgressReporter::entries(json || out.is_terminal(), partition.approximate_len(), label);
    let encodings = OutputEncodings::choose(args.encodings, partition, &bar("Reading"))?;
    let progress = bar("Exporting");
    match format {
        TransferFormat::Csv => csv_format::export(partition, encodings, &args.csv, out, &progress),
        _ => json_lines::export(partition, encodings, out, &progress),
    }
}

/// All partitions, sorted by name, or the one that is given.
fn names_to_export(db: &Database, name: Option<&str>) -> Result<Vec<String>> {
    let mut names = db.list_partitions();
    names.sort();
    if let Some(name) = name {
        open::existing_partition(db, name)?;
        names.retain(|other| other == name);
    }
    Ok(names)
}

fn approximate_len(db: &Database, names: &[String]) -> u64 {
    names.iter().filter_map(|name| db.partition(name).ok()).map(|partition| partition.approximate_len()).sum()
}

fn has_extension(path: &Path, known: &[&str]) -> bool {
    path.extension().is_some_and(|extension| known.iter().any(|known| extension.eq_ignore_ascii_case(known)))
}

fn check_csv_options(csv: &CsvArgs, format: TransferFormat) -> Result<()> {
    match format == TransferFormat::Csv || *csv == CsvArgs::default() {
        true => Ok(()),
        false => Err(CliError::usage("--key-column, --value-column and --delimiter apply to csv only")),
    }
}

fn encodings_without_text() -> CliError {
    CliError::usage("--key-encoding and --value-encoding apply to csv and jsonl only")
}
