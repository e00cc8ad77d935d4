//! The commands of the shell. Most have the arguments of the command of the same name.

use std::ffi::OsString;

use azekura::PersistMode;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};

use super::words::WORDS_HELP;
use crate::args::{CountArgs, DelArgs, GetArgs, PartitionArg, PartitionFilter, PutArgs, ScanArgs};
use crate::partition_options::{PartitionOptionArgs, partition_name};

/// Commands with the option `--partition`, whose default is the partition in use.
const WITH_PARTITION: [&str; 7] = ["get", "put", "merge", "remove", "clear", "scan", "count"];

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
    Drop {
        /// Its name.
        partition: String,
    },
    /// Print the value of a key, as one line with escapes.
    Get(GetArgs),
    /// Store an entry, or add it to the batch.
    Put(PutArgs),
    /// Change the value of a key by the merge operator of the partition, or add that to the batch.
    Merge(PutArgs),
    /// Remove keys or a range of keys, or add that to the batch.
    #[command(visible_alias = "del")]
    Remove(DelArgs),
    /// Remove all entries of a partition, and give the disk space back.
    Clear(PartitionArg),
    /// List entries, sorted by key. The writes of a batch are not visible before `commit`.
    Scan(ScanArgs),
    /// Count entries.
    Count(CountArgs),
    /// Begin a batch: the writes that follow are stored together by `commit`.
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

/// The definition of all commands, while `partition` is in use.
pub(super) fn definition(partition: &str) -> clap::Command {
    let set_default = |command: clap::Command| command.mut_arg("name", |arg| arg.default_value(partition.to_string()));
    let all = ShellLine::command();
    let all = WITH_PARTITION.iter().fold(all, |all, name| all.mut_subcommand(name, set_default));
    let without_stdin = |command: clap::Command| command.mut_arg("value", |value| value.help("The value or operand"));
    all.mut_subcommand("put", without_stdin).mut_subcommand("merge", without_stdin)
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
        definition("p").debug_assert();
        let mut users = definition("users");
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
}
