//! `partitions`: list, create, drop.

use std::io::{self, IsTerminal, Write};
use std::path::Path;

use azekura::{Database, PartitionComponents, PartitionCreateOptions};
use serde_json::json;

use crate::args::{ConfirmationArg, PartitionsAction, PartitionsArgs};
use crate::error::{CliError, CommandOutcome, Result};
use crate::open;
use crate::output::CommandOutput;
use crate::partition_options::PartitionOptionArgs;

/// Runs the subcommand.
pub(crate) fn run(args: &PartitionsArgs, db: &Path, output: &mut CommandOutput) -> Result<CommandOutcome> {
    match &args.action {
        PartitionsAction::List => {
            let db = open::open_to_read(db, output.json())?.db;
            print_names(&db, output)?;
            Ok(CommandOutcome::Success)
        }
        PartitionsAction::Create { name, options } => {
            let (create_options, components) = (options.to_options()?, options.to_components());
            let db = open::open_or_create(db)?;
            let created = create(&db, name, create_options, components)?;
            db.close()?;
            print_created(output, name, created, options)?;
            Ok(CommandOutcome::Success)
        }
        PartitionsAction::Drop { name, confirmation } => {
            confirm(&format!("the partition \"{name}\" and all its entries"), *confirmation)?;
            let db = open::open_existing(db)?;
            let existed = db.partition_exists(name);
            if existed {
                db.delete_partition_by_name(name)?;
            }
            db.close()?;
            print_dropped(output, name, existed)?;
            Ok(CommandOutcome::success_if(existed))
        }
    }
}

/// Asks whether `what` may be deleted, unless `--yes` is given.
///
/// # Errors
/// `Usage` if there is no terminal to ask at, `Negative` if the answer is not yes.
pub(crate) fn confirm(what: &str, confirmation: ConfirmationArg) -> Result<()> {
    if confirmation.yes {
        return Ok(());
    }
    if !(io::stdin().is_terminal() && io::stderr().is_terminal()) {
        return Err(CliError::usage(format!("this deletes {what}; confirm it with --yes")));
    }
    let read_error = |error| CliError::os("read", "standard input", error);
    eprint!("Delete {what}? [y/N] ");
    io::stderr().flush().map_err(read_error)?;
    let mut answer = String::new();
    io::stdin().read_line(&mut answer).map_err(read_error)?;
    match answer.trim().to_ascii_lowercase().as_str() {
        "y" | "yes" => Ok(()),
        _ => Err(CliError::negative("nothing was deleted")),
    }
}

/// Prints the names of all partitions, sorted.
pub(crate) fn print_names(db: &Database, output: &mut CommandOutput) -> Result<()> {
    let names = db.list_partitions();
    if output.json() {
        return output.line(json!({ "partitions": names }));
    }
    names.iter().try_for_each(|name| output.line(name))
}

/// Creates a partition; returns false if it exists, and then changes nothing.
pub(crate) fn create(
    db: &Database,
    name: &str,
    options: PartitionCreateOptions,
    components: PartitionComponents,
) -> Result<bool> {
    let created = !db.partition_exists(name);
    if created {
        drop(db.open_partition_with(name, options, components)?);
    }
    Ok(created)
}

/// Prints whether a partition was created.
pub(crate) fn print_created(
    output: &mut CommandOutput,
    name: &str,
    created: bool,
    options: &PartitionOptionArgs,
) -> Result<()> {
    let exists = if options.is_empty() { "exists already" } else { "exists already; its options are unchanged" };
    print_result(output, name, "created", created, exists)
}

/// Prints whether a partition was dropped.
pub(crate) fn print_dropped(output: &mut CommandOutput, name: &str, dropped: bool) -> Result<()> {
    print_result(output, name, "dropped", dropped, "does not exist")
}

fn print_result(output: &mut CommandOutput, name: &str, verb: &str, done: bool, otherwise: &str) -> Result<()> {
    let text = format!("\"{name}\" {}", if done { verb } else { otherwise });
    output.json_or_text(json!({ "partition": name, verb: done }), text)
}
