//! The commands of the shell. Most have the arguments of the command of the same name.

use std::ffi::OsString;

use azekura::PersistMode;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};

use super::words::WORDS_HELP;
use crate::args::{
    ClearArgs, ConfirmationArg, CountArgs, DelArgs, EntryArgs, GetArgs, PartitionFilter, PutArgs, ScanArgs,
};
use crate::partition_options::{PartitionOptionArgs, partition_name};

/// Commands with the option `--partition`, whose default is the partition in use.
const WITH_PARTITION: [&str; 7] = ["get", "put", "merge", "remove", "clear", "scan", "count"];

/// Commands with the option `--hex`.
const WITH_HEX: [&str; 6] = ["get", "put", "merge", "remove", "scan", "count"];

/// Commands that a shell that was started with --read-only does not have.
const WRITES: [&str; 12] =
    ["create", "drop", "put", "merge", "remove", "clear", "begin", "commit", "abort", "flush", "compact", "persist"];

/// What the commands of a shell depend on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ShellMode {
    pub(super) is_read_only: bool,
    pub(super) json: bool,
}

/// One line of the shell.
#[derive(Parser, Debug)]
#[command(
    multicall = true,
    max_term_width = 100,
    subcommand_help_heading = "Commands of the shell (`help COMMAND` shows the arguments of one)",
    help_template = "{all-args}{after-help}",
    after_help = WORDS_HELP
)]
struct ShellLine {
    #[command(subcommand)]
    command: ShellCommand,
}

/// A command.
#[derive(Subcommand, Debug)]
pub(super) enum ShellCommand {
    /// List the partitions.
    Partitions,
    /// Choose the partition of the commands that follow; at first it is "default".
    Use {
        /// Its name.
        #[arg(value_parser = partition_name)]
        partition: String,
    },
    /// Create a partition; changes nothing if it exists.
    Create {
        /// The name: any text of 1 to 255 bytes.
        #[arg(value_parser = partition_name)]
        partition: String,
        #[command(flatten)]
        options: Box<PartitionOptionArgs>,
    },
    /// Delete a partition and all its entries.
    ///
    /// Asks at a terminal. In a script, --yes is needed.
    Drop {
        /// Its name.
        partition: String,
        #[command(flatten)]
        confirmation: ConfirmationArg,
    },
    /// Print the value of a key, as one line with escapes.
    Get(GetArgs),
    /// Store an entry, or add it to the batch.
    Put(PutArgs),
    /// Change the value of a key by the merge operator of the partition, or add that to the batch.
    Merge(EntryArgs),
    /// Remove keys or a range of keys, or add that to the batch.
    #[command(visible_alias = "del")]
    Remove(DelArgs),
    /// Remove all entries of a partition, and give the disk space back.
    ///
    /// Asks at a terminal. In a script, --yes is needed.
    Clear(ClearArgs),
    /// List entries, sorted by key. The writes of a batch are not visible before `commit`.
    Scan(ScanArgs),
    /// Count entries.
    Count(CountArgs),
    /// Begin a batch: the writes that follow are stored together by `commit`, if all that they expect holds then.
    Begin,
    /// Store all writes of the batch, or none of them.
    Commit {
        /// Failures that the batch survives as soon as it is stored.
        #[arg(long, value_enum, value_name = "MODE")]
        durability: Option<DurabilityArg>,
    },
    /// Discard the writes of the batch.
    #[command(visible_alias = "rollback")]
    Abort,
    /// Show the counters since the shell opened the database, without rows of zeros.
    Stats {
        #[command(flatten)]
        filter: PartitionFilter,
        /// Also show rows of zeros; JSON always has them.
        #[arg(long)]
        all: bool,
    },
    /// Write memtables to tables.
    Flush(PartitionFilter),
    /// Merge the tables of a partition, dropping deleted and overwritten entries.
    Compact(PartitionFilter),
    /// Make everything that was written durable.
    Persist {
        /// Failures that it survives.
        #[arg(value_enum, value_name = "MODE", default_value = "sync-all")]
        mode: DurabilityArg,
    },
    /// End the shell; so does the end of the input (Ctrl-D).
    #[command(visible_alias = "exit")]
    Quit,
}

/// Failures that writes survive.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DurabilityArg {
    /// The end of the process, also by a crash.
    Buffer,
    /// Power failure; the bytes of the WAL are synced.
    SyncData,
    /// Power failure; the bytes and the metadata of the WAL are synced.
    SyncAll,
}

impl DurabilityArg {
    pub(super) fn mode(self) -> PersistMode {
        match self {
            DurabilityArg::Buffer => PersistMode::Buffer,
            DurabilityArg::SyncData => PersistMode::SyncData,
            DurabilityArg::SyncAll => PersistMode::SyncAll,
        }
    }
}

/// The definition of all commands, while `partition` is in use. Its help shows those that apply.
pub(super) fn definition(partition: &str, mode: ShellMode) -> clap::Command {
    let set_default = |command: clap::Command| command.mut_arg("name", |arg| arg.default_value(partition.to_string()));
    let all = ShellLine::command();
    let all = WITH_PARTITION.iter().fold(all, |all, name| all.mut_subcommand(name, set_default));
    let without_stdin = |command: clap::Command| command.mut_arg("value", |value| value.help("The value or operand"));
    let all = all.mut_subcommand("put", without_stdin).mut_subcommand("merge", without_stdin);
    let hex = |command: clap::Command| {
        command.mut_arg("hex", |arg| arg.help("Keys and values in the line and in the output are hexadecimal"))
    };
    let all = WITH_HEX.iter().fold(all, |all, name| all.mut_subcommand(name, hex));
    let for_json = |name: &'static str, scan: clap::Command| scan.mut_arg(name, |arg| arg.hide(!mode.json));
    let all = all.mut_subcommand("scan", |scan| for_json("value_encoding", for_json("key_encoding", scan)));
    if !mode.is_read_only {
        return all;
    }
    WRITES.iter().fold(all, |all, name| all.mut_subcommand(name, |command| command.hide(true)))
}

/// Parses the words of a line. `definition` can be used again.
///
/// # Errors
/// That of clap, which is also the text of a help page.
pub(super) fn parse(words: Vec<OsString>, definition: &mut clap::Command) -> Result<ShellCommand, clap::Error> {
    let matches = definition.try_get_matches_from_mut(words)?;
    ShellLine::from_arg_matches(&matches).map(|line| line.command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partition_in_use_is_the_default() {
        let mode = ShellMode { is_read_only: false, json: false };
        definition("p", mode).debug_assert();
        let mut users = definition("users", mode);
        let mut parsed = |line: &str| parse(line.split(' ').map(OsString::from).collect(), &mut users);
        for _ in 0..2 {
            let Ok(ShellCommand::Get(args)) = parsed("get k") else { panic!("not a get") };
            assert_eq!(args.partition.name, "users");
            let Ok(ShellCommand::Remove(args)) = parsed("del a b --partition x") else { panic!("no removal") };
            assert_eq!((&*args.partition.name, args.keys.len()), ("x", 2));
            assert!(parsed("help").unwrap_err().to_string().contains("begins with #"));
            assert!(parsed("fly").unwrap_err().use_stderr());
        }
    }

    /// The help of a read-only shell listed the commands that write, and that of `merge` a time to live.
    #[test]
    fn help_shows_what_applies() {
        let help = |line: &str, is_read_only, json| {
            let words = line.split(' ').map(OsString::from).collect();
            parse(words, &mut definition("p", ShellMode { is_read_only, json })).unwrap_err().to_string()
        };
        assert!(help("help", false, false).contains("Store an entry"));
        let read_only = help("help", true, false);
        assert!(read_only.contains("List entries") && !read_only.contains("Store") && !read_only.contains("persist"));
        assert!(help("help scan", false, true).contains("--key-encoding"));
        assert!(!help("help scan", false, false).contains("--key-encoding"));
        assert!(!help("help merge", false, false).contains("--ttl"));
        assert!(!help("help put", false, false).contains("standard input"));
    }
}
