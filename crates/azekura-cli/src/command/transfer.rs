//! `import` and `export`: entries as a directory or as JSON lines, byte for byte in both directions.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::path::Path;

use azekura::{Batch, ErrorKind, Partition};
use serde_json::{Map, Value, json};
use walkdir::{DirEntry, WalkDir};

use crate::args::{ExportArgs, ImportArgs, TransferFormat};
use crate::error::{CliError, CommandOutcome, Result, print_error};
use crate::open::{self, WritablePartition};
use crate::output::CommandOutput;
use crate::progress::ProgressReporter;
use crate::{display, encoding, path_key};

/// Limits of one import batch: large enough for throughput, small enough for memory.
const BATCH_BYTES: u64 = 4 << 20;
const BATCH_ENTRIES: usize = 1000;

/// Size of the buffers for JSON lines, in bytes.
const BUFFER_BYTES: usize = 256 << 10;

/// Counts of stored or written entries, and the skipped ones with the reasons.
#[derive(Debug, Default)]
struct TransferReport {
    entries: u64,
    bytes: u64,
    skipped: Vec<(String, String)>,
}

impl TransferReport {
    fn count(&mut self, key: &[u8], value: &[u8]) {
        self.entries += 1;
        self.bytes += (key.len() + value.len()) as u64;
    }

    fn print(&self, verb: &str, output: &mut CommandOutput) -> Result<CommandOutcome> {
        let skipped: Vec<_> =
            self.skipped.iter().map(|(name, reason)| json!({ "name": name, "reason": reason })).collect();
        output.json_or_text(
            json!({ "entries": self.entries, "bytes": self.bytes, "left_out": skipped }),
            format_args!("{}, {} {verb}", display::plural(self.entries, "entry"), display::bytes(self.bytes)),
        )?;
        if !output.json() {
            self.skipped
                .iter()
                .for_each(|(name, reason)| print_error(format_args!("azekura: skipped {name}: {reason}")));
        }
        Ok(CommandOutcome::success_if(self.skipped.is_empty()))
    }
}

/// Stores a directory or JSON lines in a partition.
pub(crate) fn import(args: &ImportArgs, db: &Path, output: &mut CommandOutput) -> Result<CommandOutcome> {
    let detected = if args.source.is_dir() { TransferFormat::Dir } else { TransferFormat::Jsonl };
    let report = match args.format.unwrap_or(detected) {
        TransferFormat::Dir => import_directory(&args.source, db, &args.partition.name, output.json())?,
        TransferFormat::Jsonl => import_lines(&args.source, db, &args.partition.name, output.json())?,
    };
    report.print("stored", output)
}

/// Stores every regular file below `source` under its relative path. Skips unreadable files.
fn import_directory(source: &Path, db: &Path, partition: &str, json: bool) -> Result<TransferReport> {
    if !source.is_dir() {
        return Err(CliError::input(source, "not a directory"));
    }
    let mut loader = BatchLoader::new(db, partition, ProgressReporter::spinner(json, "Importing"));
    // The database may be inside `source`, and may be created during the walk. Its files are not imported.
    let is_database = |entry: &DirEntry| {
        let database = || fs::canonicalize(db).ok();
        entry.file_type().is_dir() && fs::canonicalize(entry.path()).is_ok_and(|dir| database() == Some(dir))
    };
    for entry in WalkDir::new(source).sort_by_file_name().into_iter().filter_entry(|entry| !is_database(entry)) {
        match entry {
            Ok(entry) if entry.file_type().is_file() => import_file(entry.path(), source, &mut loader)?,
            Ok(_) => {}
            Err(error) => {
                let name = error.path().unwrap_or(source).display().to_string();
                loader.skip(name, error.into_io_error().map_or("a loop of symbolic links".into(), |e| e.to_string()));
            }
        }
    }
    loader.finish()
}

fn import_file(path: &Path, source: &Path, loader: &mut BatchLoader<'_>) -> Result<()> {
    let name = || path.display().to_string();
    let length = path.metadata().map_or(0, |data| data.len());
    if length > u64::from(u32::MAX) {
        loader.skip(name(), format!("{} exceed the maximum size of a value", display::bytes(length)));
        return Ok(());
    }
    match fs::read(path) {
        Ok(content) => {
            loader.progress.add(1);
            loader.progress.message(name());
            loader.put(&path_key::from_path(path, source), &content, name)
        }
        Err(error) => {
            loader.skip(name(), error.to_string());
            Ok(())
        }
    }
}

/// Stores every JSON line of a file, or of standard input if `source` is "-".
fn import_lines(source: &Path, db: &Path, partition: &str, json: bool) -> Result<TransferReport> {
    let loader = |bytes| BatchLoader::new(db, partition, ProgressReporter::bytes(json, bytes, "Importing"));
    if source == Path::new("-") {
        return load_lines(io::stdin().lock(), source, loader(0));
    }
    let file = File::open(source).map_err(|e| CliError::os("open the input", source, e))?;
    let length = file.metadata().map_or(0, |data| data.len());
    load_lines(BufReader::with_capacity(BUFFER_BYTES, file), source, loader(length))
}

fn load_lines(mut input: impl BufRead, source: &Path, mut loader: BatchLoader<'_>) -> Result<TransferReport> {
    let mut line = Vec::new();
    for number in 1u64.. {
        line.clear();
        let n = input.read_until(b'\n', &mut line).map_err(|e| CliError::os("read the input", source, e))?;
        if n == 0 {
            break;
        }
        loader.progress.add(n as u64);
        if line.trim_ascii().is_empty() {
            continue;
        }
        match parse_line(&line) {
            Ok((key, value)) => loader.put(&key, &value, || format!("line {number}"))?,
            Err(reason) => {
                let stored = loader.finish_after_error()?.entries;
                let message = format!("line {number} is not an entry: {reason}; the {stored} before it were stored");
                return Err(CliError::input(source, message));
            }
        }
    }
    loader.finish()
}

fn parse_line(line: &[u8]) -> Result<(Vec<u8>, Vec<u8>), String> {
    match serde_json::from_slice(line) {
        Ok(Value::Object(mut object)) => {
            Ok((encoding::take_json(&mut object, "key")?, encoding::take_json(&mut object, "value")?))
        }
        Ok(_) => Err("it is not a JSON object".into()),
        Err(error) => Err(error.to_string()),
    }
}

/// Stores entries in batches. Opens the partition, and creates it if it is missing, at the first entry: input that is
/// invalid before its first entry creates nothing.
struct BatchLoader<'a> {
    db: &'a Path,
    partition: &'a str,
    target: Option<(WritablePartition, Batch)>,
    batch_bytes: u64,
    report: TransferReport,
    progress: ProgressReporter,
}

impl<'a> BatchLoader<'a> {
    fn new(db: &'a Path, partition: &'a str, progress: ProgressReporter) -> BatchLoader<'a> {
        BatchLoader { db, partition, target: None, batch_bytes: 0, report: TransferReport::default(), progress }
    }

    fn target(&mut self) -> Result<&mut (WritablePartition, Batch)> {
        if self.target.is_none() {
            let target = open::partition_to_write(self.db, self.partition)?;
            let batch = target.db.batch();
            self.target = Some((target, batch));
        }
        Ok(self.target.as_mut().expect("it was opened above"))
    }

    /// Adds one entry to the batch. Stores a large entry alone, and skips it if it exceeds the limits of the database.
    fn put(&mut self, key: &[u8], value: &[u8], name: impl Fn() -> String) -> Result<()> {
        let bytes = (key.len() + value.len()) as u64;
        if bytes >= BATCH_BYTES || key.len() > usize::from(u16::MAX) {
            self.commit()?;
            match self.target()?.0.partition.insert(key, value) {
                Ok(()) => self.report.count(key, value),
                Err(error) if error.kind() == ErrorKind::Invalid => self.skip(name(), error.message().to_string()),
                Err(error) => return Err(error.into()),
            }
            return Ok(());
        }
        let (target, batch) = self.target()?;
        batch.insert(&target.partition, key, value);
        let entries = batch.len();
        self.batch_bytes += bytes;
        self.report.count(key, value);
        if self.batch_bytes >= BATCH_BYTES || entries >= BATCH_ENTRIES {
            self.commit()?;
        }
        Ok(())
    }

    fn skip(&mut self, name: String, reason: String) {
        self.report.skipped.push((name, reason));
    }

    fn commit(&mut self) -> Result<()> {
        self.batch_bytes = 0;
        if let Some((target, batch)) = &mut self.target {
            std::mem::replace(batch, target.db.batch()).commit()?;
        }
        Ok(())
    }

    /// Commits the last batch and closes the database. Valid input without entries creates an empty partition.
    fn finish(mut self) -> Result<TransferReport> {
        let stored = self.report.skipped.is_empty() || self.report.entries > 0;
        if stored {
            self.target()?;
        }
        self.close(stored)
    }

    /// Commits the entries before an invalid one and closes the database.
    fn finish_after_error(self) -> Result<TransferReport> {
        let stored = self.report.entries > 0;
        self.close(stored)
    }

    fn close(mut self, stored: bool) -> Result<TransferReport> {
        self.commit()?;
        if let Some((target, batch)) = self.target {
            drop(batch);
            target.close(stored)?;
        }
        Ok(self.report)
    }
}

/// Writes a partition to a directory or as JSON lines.
pub(crate) fn export(args: &ExportArgs, db: &Path, output: &mut CommandOutput) -> Result<CommandOutcome> {
    let to_stdout = args.target == Path::new("-");
    let lines = to_stdout
        || args.target.extension().is_some_and(|e| ["jsonl", "ndjson", "json"].iter().any(|known| e == *known));
    let detected = if lines { TransferFormat::Jsonl } else { TransferFormat::Dir };
    let (_db, partition) = open::partition_to_read(db, &args.partition.name)?;
    let report = match args.format.unwrap_or(detected) {
        TransferFormat::Dir => export_directory(&partition, &args.target, output.json())?,
        TransferFormat::Jsonl if to_stdout => {
            for entry in partition.iter() {
                let (key, value) = entry?;
                output.line(entry_json(&key, &value))?;
            }
            return Ok(CommandOutcome::Success);
        }
        TransferFormat::Jsonl => export_lines(&partition, &args.target, output.json())?,
    };
    report.print("written", output)
}

/// Writes every value to the file below `target` whose relative path is the key. `target` must be new or empty, so that
/// it contains no symbolic link to another directory.
fn export_directory(partition: &Partition, target: &Path, json: bool) -> Result<TransferReport> {
    fs::create_dir_all(target).map_err(|e| CliError::os("create the directory", target, e))?;
    let mut names = fs::read_dir(target).map_err(|e| CliError::os("read the directory", target, e))?;
    if names.next().is_some() {
        return Err(CliError::input(target, "the directory must be new or empty"));
    }
    let progress = ProgressReporter::entries(json, partition.approximate_len(), "Exporting");
    let mut report = TransferReport::default();
    for entry in partition.iter() {
        let (key, value) = entry?;
        let name = || encoding::escaped(&key);
        let Some(relative) = path_key::to_relative_path(&key) else {
            report.skipped.push((name(), "the key is not a safe relative path".into()));
            continue;
        };
        match write_file(&target.join(relative), &value) {
            Ok(()) => {
                report.count(&key, &value);
                progress.add(1);
            }
            // One key is the directory of another key ("a" and "a/b"), or a name is too long for this file system.
            Err(error) if is_bad_name(error.kind()) => report.skipped.push((name(), error.to_string())),
            Err(error) => return Err(CliError::os("write a file", target.join(name()), error)),
        }
    }
    Ok(report)
}

/// Writes a new file; removes it after an error, because a truncated file would look complete.
fn write_file(path: &Path, content: &[u8]) -> io::Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    let mut file = OpenOptions::new().write(true).create_new(true).open(path)?;
    file.write_all(content).inspect_err(|_| drop(fs::remove_file(path)))
}

fn is_bad_name(kind: io::ErrorKind) -> bool {
    use io::ErrorKind::{AlreadyExists, InvalidFilename, InvalidInput, IsADirectory, NotADirectory};
    matches!(kind, AlreadyExists | InvalidFilename | InvalidInput | IsADirectory | NotADirectory)
}

/// Writes JSON lines to a new file; removes it after an error, because a truncated file would look complete.
fn export_lines(partition: &Partition, target: &Path, json: bool) -> Result<TransferReport> {
    let write_error = |e| CliError::os("write the file", target, e);
    let file = OpenOptions::new().write(true).create_new(true).open(target);
    let mut out = BufWriter::with_capacity(BUFFER_BYTES, file.map_err(|e| CliError::os("create the file", target, e))?);
    let progress = ProgressReporter::entries(json, partition.approximate_len(), "Exporting");
    let mut write_all = || -> Result<TransferReport> {
        let mut report = TransferReport::default();
        for entry in partition.iter() {
            let (key, value) = entry?;
            writeln!(out, "{}", entry_json(&key, &value)).map_err(write_error)?;
            report.count(&key, &value);
            progress.add(1);
        }
        out.flush().map_err(write_error)?;
        Ok(report)
    };
    write_all().inspect_err(|_| drop(fs::remove_file(target)))
}

fn entry_json(key: &[u8], value: &[u8]) -> Value {
    let mut object = Map::new();
    encoding::put_json(&mut object, "key", key, false);
    encoding::put_json(&mut object, "value", value, false);
    Value::Object(object)
}
