//! `partitions`: list, create, drop.

use std::path::Path;

use azekura::{Database, PartitionCreateOptions};
use serde_json::json;

use crate::args::{PartitionsAction, PartitionsArgs};
use crate::error::{CommandOutcome, Result};
use crate::open;
use crate::output::CommandOutput;
use crate::partition_options::PartitionOptionArgs;

/// Runs the subcommand.
pub(crate) fn run(args: &PartitionsArgs, db: &Path, output: &mut CommandOutput) -> Result<CommandOutcome> {
    match &args.action {
        PartitionsAction::List => {
            let db = open::open_read_only(db)?;
            let mut names = db.list_partitions();
            names.sort();
            if output.json() {
                output.line(json!({ "partitions": names }))?;
            } else {
                names.iter().try_for_each(|name| output.line(name))?;
            }
            Ok(CommandOutcome::Success)
        }
        PartitionsAction::Create { name, options } => {
            let create_options = options.to_options()?;
            let db = open::open_or_create(db)?;
            let created = create(&db, name, create_options)?;
            db.close()?;
            print_created(output, name, created, options)?;
            Ok(CommandOutcome::Success)
        }
        PartitionsAction::Drop { name } => {
            let db = open::open_existing(db)?;
            let existed = db.partition_exists(name);
            if existed {
                db.delete_partition(open::existing_partition(&db, name)?)?;
            }
            db.close()?;
            print_result(output, name, "dropped", existed, "does not exist")?;
            Ok(CommandOutcome::success_if(existed))
        }
    }
}

/// Creates a partition; returns false if it exists, and then changes nothing.
fn create(db: &Database, name: &str, options: PartitionCreateOptions) -> Result<bool> {
    let created = !db.partition_exists(name);
    if created {
        drop(db.open_partition(name, options)?);
    }
    Ok(created)
}

fn print_created(output: &mut CommandOutput, name: &str, created: bool, options: &PartitionOptionArgs) -> Result<()> {
    let exists = if options.is_empty() { "exists already" } else { "exists already; its options are unchanged" };
    print_result(output, name, "created", created, exists)
}

fn print_result(output: &mut CommandOutput, name: &str, verb: &str, done: bool, otherwise: &str) -> Result<()> {
    let text = format!("\"{name}\" {}", if done { verb } else { otherwise });
    output.json_or_text(json!({ "partition": name, verb: done }), text)
}
