//! An open database with the state of the shell: the partition in use, and the batch that was begun.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use azekura::{Batch, Database, Partition};
use clap::error::ErrorKind;
use serde_json::json;

use super::shell_command::{self, DurabilityArg, ShellCommand, ShellMode};
use super::words;
use crate::args::{
    ClearArgs, ConfirmationArg, CountArgs, DelArgs, EntryArgs, GetArgs, PartitionFilter, PutArgs, ScanArgs, ShellArgs,
};
use crate::command::point::{self, PutEntry, ValueForm};
use crate::command::stats::StatsReading;
use crate::command::{maintenance, partitions, range};
use crate::display::{self, plural};
use crate::encoding;
use crate::error::{self, CliError, Result, engine_error_json, print_notice};
use crate::open;
use crate::output::CommandOutput;
use crate::partition_options::PartitionOptionArgs;

/// Whether the shell reads another line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ShellFlow {
    Continue,
    Quit,
}

/// The state between two lines.
#[derive(Debug)]
pub(super) struct ShellSession<'a> {
    path: &'a Path,
    mode: ShellMode,
    /// `None` until a write creates the database.
    db: Option<Database>,
    /// Whether `db` is a follower, because another process had the database open for writing.
    is_follower: bool,
    partition: String,
    /// The definition of the commands, while this partition is in use.
    commands: clap::Command,
    batch: Option<Batch>,
}

impl<'a> ShellSession<'a> {
    /// Opens the database if it exists. A missing one is created by the first write.
    pub(super) fn open(args: &ShellArgs, path: &'a Path, json: bool) -> Result<ShellSession<'a>> {
        let opened = match args.read_only {
            true => Some(open::open_to_read(path, json)?),
            false if path.symlink_metadata().is_ok() && !open::is_empty_directory(path) => {
                Some(open::open_to_write_or_read(path, json)?)
            }
            false => None,
        };
        let is_follower = opened.as_ref().is_some_and(|opened| opened.is_follower);
        let db = opened.map(|opened| opened.db);
        let partition = args.partition.name.clone();
        let mode = ShellMode { is_read_only: args.read_only, json };
        let commands = shell_command::definition(&partition, mode);
        Ok(ShellSession { path, mode, db, is_follower, partition, commands, batch: None })
    }

    /// Closes the database. Writes of a batch that was not committed are discarded.
    pub(super) fn close(self) -> Result<()> {
        drop(self.batch);
        self.db.map_or(Ok(()), |db| Ok(db.close()?))
    }

    /// The open database.
    pub(super) fn db(&self) -> Option<&Database> {
        self.db.as_ref()
    }

    /// The name of the partition in use.
    pub(super) fn partition(&self) -> &str {
        &self.partition
    }

    /// Number of writes in the batch; `None` if no batch was begun.
    pub(super) fn batch_len(&self) -> Option<usize> {
        self.batch.as_ref().map(Batch::len)
    }

    /// Example: "users (batch of 2)> ".
    pub(super) fn prompt(&self) -> String {
        let state = match self.batch_len() {
            Some(writes) => format!(" (batch of {writes})"),
            None if self.mode.is_read_only || self.is_follower => " (read-only)".into(),
            None => String::new(),
        };
        format!("{}{state}> ", encoding::escaped(self.partition.as_bytes()))
    }

    /// Carries out one line. An empty line and a comment do nothing.
    pub(super) fn execute_line(&mut self, line: &[u8], output: &mut CommandOutput) -> Result<ShellFlow> {
        if line.trim_ascii_start().starts_with(b"#") {
            return Ok(ShellFlow::Continue);
        }
        let words = words::split(line).map_err(CliError::usage)?;
        if words.is_empty() {
            return Ok(ShellFlow::Continue);
        }
        let name = encoding::escaped(&words[0]);
        let words = words.into_iter().map(os_string).collect::<Result<_>>()?;
        match shell_command::parse(words, &mut self.commands) {
            Ok(ShellCommand::Quit) => return Ok(ShellFlow::Quit),
            Ok(command) => self.execute(command, output)?,
            Err(error) if error.use_stderr() => return Err(usage_error(&error, &name)),
            Err(help) => output.write_bytes(help.to_string().as_bytes())?,
        }
        Ok(ShellFlow::Continue)
    }

    fn execute(&mut self, command: ShellCommand, output: &mut CommandOutput) -> Result<()> {
        self.catch_up()?;
        match command {
            ShellCommand::Partitions => partitions::print_names(self.existing()?, output),
            ShellCommand::Use { partition } => self.use_partition(partition, output),
            ShellCommand::Create { partition, options } => self.create(&partition, &options, output),
            ShellCommand::Drop { partition, confirmation } => self.drop_partition(&partition, confirmation, output),
            ShellCommand::Get(args) => self.get(&args, output),
            ShellCommand::Put(args) => self.put(&args, output),
            ShellCommand::Merge(args) => self.merge(&args, output),
            ShellCommand::Remove(args) => self.remove(&args, output),
            ShellCommand::Clear(args) => self.clear(&args, output),
            ShellCommand::Scan(args) => self.scan(&args, output),
            ShellCommand::Count(args) => self.count(&args, output),
            ShellCommand::Begin => self.begin(output),
            ShellCommand::Commit { durability } => self.commit(durability, output),
            ShellCommand::Abort => self.abort(output),
            ShellCommand::Stats { filter, all } => self.stats(&filter, all, output),
            ShellCommand::Flush(filter) => self.flush(&filter, output),
            ShellCommand::Compact(filter) => self.compact(&filter, output),
            ShellCommand::Persist { mode } => self.persist(mode, output),
            ShellCommand::Quit => Ok(()),
        }
    }

    /// Shows what the writer has committed since the last command, if the database is a follower. If that fails, the
    /// command reads what the last one has read. If the writer has lost it, the database is opened again.
    fn catch_up(&mut self) -> Result<()> {
        let Some(db) = self.db.as_ref().filter(|_| self.is_follower) else { return Ok(()) };
        let Err(error) = db.catch_up() else { return Ok(()) };
        let seqno = db.change_position()?.sequence_number();
        let is_stale = error.kind() == azekura::ErrorKind::Stale;
        let then = if is_stale { "opening the database again" } else { "reading what was committed before" };
        let notice = json!({ "kind": "cannot_catch_up", "error": engine_error_json(&error), "sequence_number": seqno });
        let text = format_args!("azekura: cannot catch up from sequence number {seqno}: {error}; {then}.");
        print_notice(self.mode.json, notice, text);
        if is_stale {
            self.db = Some(open::open_beside(self.path, error.into(), self.mode.json)?);
        }
        Ok(())
    }

    /// The database; fails if there is none.
    fn existing(&mut self) -> Result<&Database> {
        if self.db.is_none() {
            self.db = Some(open::open_existing(self.path)?);
        }
        Ok(self.db.as_ref().expect("it was opened above"))
    }

    /// The database, to write to; creates it if it is missing.
    fn existing_or_new(&mut self) -> Result<&Database> {
        self.check_writable()?;
        if self.db.is_none() {
            self.db = Some(open::open_or_create(self.path)?);
        }
        Ok(self.db.as_ref().expect("it was opened above"))
    }

    /// Fails if the database cannot be written to. A follower is replaced if its writer has closed the database.
    fn check_writable(&mut self) -> Result<()> {
        if self.mode.is_read_only {
            return Err(CliError::input(self.path, "the shell was started with --read-only, so it cannot write"));
        }
        if self.is_follower {
            self.db = Some(open::open_existing(self.path)?);
            self.is_follower = false;
        }
        Ok(())
    }

    fn existing_partition(&mut self, name: &str) -> Result<Partition> {
        open::existing_partition(self.existing()?, name)
    }

    fn use_partition(&mut self, name: String, output: &mut CommandOutput) -> Result<()> {
        self.existing_partition(&name)?;
        self.commands = shell_command::definition(&name, self.mode);
        self.partition = name;
        if output.json() { output.line(json!({ "partition": self.partition })) } else { Ok(()) }
    }

    fn create(&mut self, name: &str, options: &PartitionOptionArgs, output: &mut CommandOutput) -> Result<()> {
        let (create_options, components) = (options.to_options()?, options.to_components());
        let created = partitions::create(self.existing_or_new()?, name, create_options, components)?;
        partitions::print_created(output, name, created, options)
    }

    fn drop_partition(&mut self, name: &str, confirmation: ConfirmationArg, output: &mut CommandOutput) -> Result<()> {
        self.check_writable()?;
        if self.batch.is_some() {
            return Err(CliError::usage("a partition cannot be dropped within a batch; `commit` or `abort` it first"));
        }
        let db = self.existing()?;
        if !db.partition_exists(name) {
            return Err(CliError::negative(format!("no partition is named \"{name}\"")));
        }
        partitions::confirm(&format!("the partition \"{name}\" and all its entries"), confirmation)?;
        db.delete_partition_by_name(name)?;
        partitions::print_dropped(output, name, true)
    }

    fn get(&mut self, args: &GetArgs, output: &mut CommandOutput) -> Result<()> {
        let key = encoding::argument_bytes(&args.key, args.hex.hex)?;
        let value = self.existing_partition(&args.partition.name)?.get(&key)?;
        point::print_get(args, &key, value.as_deref(), ValueForm::Line, output)?;
        value.map(drop).ok_or_else(|| CliError::negative(point::no_value(args, &key)))
    }

    fn put(&mut self, args: &PutArgs, output: &mut CommandOutput) -> Result<()> {
        self.check_writable()?;
        let put = PutEntry::of(args, entry_without_stdin(&args.entry)?)?;
        let name = &args.entry.partition.name;
        let is_batch = self.batch.is_some();
        let db = if args.create { self.existing_or_new()? } else { self.existing()? };
        if args.create && is_batch && !db.partition_exists(name) {
            return Err(CliError::usage("a batch cannot create a partition; `create` it first"));
        }
        let (partition, created) = open::partition_to_put(db, name, args.create)?;
        if is_batch {
            self.add_to_batch(|batch| put.add_to(batch, &partition))?;
        } else {
            let mut batch = self.existing()?.batch();
            put.add_to(&mut batch, &partition);
            if let Err(error) = batch.commit() {
                if created {
                    self.existing()?.delete_partition_by_name(name)?;
                }
                return Err(CliError::refused(error));
            }
        }
        point::print_put(&args.entry, &put.key, &put.value, output)
    }

    fn merge(&mut self, args: &EntryArgs, output: &mut CommandOutput) -> Result<()> {
        self.check_writable()?;
        let (key, operand) = entry_without_stdin(args)?;
        let partition = self.existing_partition(&args.partition.name)?;
        match self.batch.is_some() {
            true => self.add_to_batch(|batch| batch.merge(&partition, &key, &operand))?,
            false => partition.merge(&key, &operand)?,
        }
        point::print_put(args, &key, &operand, output)
    }

    fn remove(&mut self, args: &DelArgs, output: &mut CommandOutput) -> Result<()> {
        self.check_writable()?;
        let removal = point::removal(args)?;
        let partition = self.existing_partition(&args.partition.name)?;
        if self.batch.is_none() {
            let existed = point::remove_in(self.existing()?, &partition, &removal)?;
            return point::print_removed(&removal, existed, output);
        }
        self.add_to_batch(|batch| point::add_removal(batch, &partition, &removal))?;
        if output.json() { output.line(json!({ "asked": args.keys.len() })) } else { Ok(()) }
    }

    fn clear(&mut self, args: &ClearArgs, output: &mut CommandOutput) -> Result<()> {
        self.check_writable()?;
        if self.batch.is_some() {
            return Err(CliError::usage("a partition cannot be cleared within a batch; `commit` or `abort` it first"));
        }
        let partition = self.existing_partition(&args.partition.name)?;
        point::confirm_clear(args)?;
        point::clear_in(&partition, output)
    }

    /// Adds a write to the batch. A write that breaks a limit discards the batch.
    fn add_to_batch(&mut self, write: impl FnOnce(&mut Batch)) -> Result<()> {
        let Some(batch) = &mut self.batch else { return Ok(()) };
        write(batch);
        if batch.error().is_none() {
            return Ok(());
        }
        // The batch keeps the error, and `commit` returns it and stores nothing.
        let refused = batch.commit();
        self.batch = None;
        refused.map_err(|error| CliError::from(error).with_note("the batch was discarded"))
    }

    fn scan(&mut self, args: &ScanArgs, output: &mut CommandOutput) -> Result<()> {
        let bounds = range::bounds(&args.range, args.hex.hex)?;
        range::scan_in(&self.existing_partition(&args.partition.name)?, args, bounds, output)
    }

    fn count(&mut self, args: &CountArgs, output: &mut CommandOutput) -> Result<()> {
        let bounds = range::bounds(&args.range, args.hex.hex)?;
        let n = range::count_in(&self.existing_partition(&args.partition.name)?, bounds)?;
        range::print_count(n, output)
    }

    fn begin(&mut self, output: &mut CommandOutput) -> Result<()> {
        if let Some(writes) = self.batch_len() {
            let open = plural(writes as u64, "write");
            return Err(CliError::usage(format!("a batch of {open} is open; `commit` or `abort` it first")));
        }
        self.check_writable()?;
        self.batch = Some(self.existing()?.batch());
        if output.json() { output.line(json!({ "batch": 0 })) } else { Ok(()) }
    }

    fn take_batch(&mut self) -> Result<Batch> {
        self.batch.take().ok_or_else(|| CliError::usage("there is no batch; `begin` begins one"))
    }

    fn commit(&mut self, durability: Option<DurabilityArg>, output: &mut CommandOutput) -> Result<()> {
        let mut batch = self.take_batch()?;
        let writes = batch.len();
        if let Some(durability) = durability {
            batch.durability(durability.mode());
        }
        batch.commit().map_err(|error| CliError::refused(error).with_note("the batch was discarded"))?;
        let text = format!("{} committed", plural(writes as u64, "write"));
        output.json_or_text(json!({ "committed": writes }), text)
    }

    fn abort(&mut self, output: &mut CommandOutput) -> Result<()> {
        let writes = self.take_batch()?.len();
        let text = format!("{} discarded", plural(writes as u64, "write"));
        output.json_or_text(json!({ "discarded": writes }), text)
    }

    fn stats(&mut self, filter: &PartitionFilter, all: bool, output: &mut CommandOutput) -> Result<()> {
        let is_follower = self.is_follower;
        let reading = StatsReading::of(self.existing()?, is_follower, filter.partition.as_deref())?;
        if output.json() { output.line(reading.to_json()) } else { reading.print(all, output) }
    }

    fn flush(&mut self, filter: &PartitionFilter, output: &mut CommandOutput) -> Result<()> {
        self.check_writable()?;
        let mut flushed = Vec::new();
        for partition in open::partitions(self.existing()?, filter.partition.as_deref())? {
            partition.flush()?;
            flushed.push((partition.name.to_string(), partition.disk_space()));
        }
        if output.json() {
            let rows: Vec<_> = flushed.iter().map(|(name, bytes)| json!({ "name": name, "bytes": bytes })).collect();
            return output.line(json!({ "partitions": rows }));
        }
        let mut lines = flushed.iter().map(|(name, bytes)| format!("{name}: {} on disk", display::bytes(*bytes)));
        lines.try_for_each(|line| output.line(line))
    }

    fn compact(&mut self, filter: &PartitionFilter, output: &mut CommandOutput) -> Result<()> {
        self.check_writable()?;
        let compacted = maintenance::compact_in(self.existing()?, filter, output.json())?;
        maintenance::print_compacted(&compacted, output)
    }

    fn persist(&mut self, durability: DurabilityArg, output: &mut CommandOutput) -> Result<()> {
        self.check_writable()?;
        self.existing()?.persist(durability.mode())?;
        if output.json() { output.line(json!({ "persisted": true })) } else { Ok(()) }
    }
}

/// The error of the command `name` that clap refused.
fn usage_error(error: &clap::Error, name: &str) -> CliError {
    CliError::usage(match error.kind() {
        ErrorKind::InvalidSubcommand => format!("there is no command \"{name}\"; `help` lists the commands"),
        _ => format!("{}; `help {name}` shows the arguments", error::usage_message(error)),
    })
}

#[cfg(unix)]
fn os_string(bytes: Vec<u8>) -> Result<OsString> {
    Ok(std::os::unix::ffi::OsStringExt::from_vec(bytes))
}

/// Arguments are text on this system.
#[cfg(not(unix))]
fn os_string(bytes: Vec<u8>) -> Result<OsString> {
    let text = String::from_utf8(bytes);
    text.map(OsString::from).map_err(|_| CliError::usage("a word is not UTF-8; give its bytes with --hex"))
}

/// The key and the value of the arguments.
///
/// # Errors
/// `Usage` if the value would be read from standard input.
fn entry_without_stdin(args: &EntryArgs) -> Result<(Vec<u8>, Vec<u8>)> {
    if args.value.as_deref() == Some(OsStr::new("-")) {
        return Err(CliError::usage(
            "\"-\" would read standard input, which has the commands; give the value or --file (a hyphen is \"2d\" \
             with --hex)",
        ));
    }
    point::entry_to_put(args)
}
