//! `partitions`: list, create, drop.

use azekura::PartitionCreateOptions;
use serde_json::json;

use crate::args::{PartitionsAction, PartitionsArgs};
use crate::failure::{Answer, Result};
use crate::open;
use crate::output::Output;

/// Does what was asked for.
pub(crate) fn run(args: &PartitionsArgs, output: &mut Output) -> Result<Answer> {
    let path = &args.db.path;
    match &args.action {
        PartitionsAction::List => {
            let db = open::to_read(path)?;
            let mut names = db.list_partitions();
            names.sort();
            if output.json() {
                output.line(json!({ "partitions": names }))?;
            } else {
                names.iter().try_for_each(|name| output.line(name))?;
            }
            Ok(Answer::Yes)
        }
        PartitionsAction::Create { name } => {
            let db = open::to_fill(path)?;
            let created = !db.partition_exists(name);
            if created {
                drop(db.open_partition(name, PartitionCreateOptions::default())?);
            }
            db.close()?;
            tell(output, name, "created", created, "existed already")?;
            Ok(Answer::Yes)
        }
        PartitionsAction::Drop { name } => {
            let db = open::to_change(path)?;
            let existed = db.partition_exists(name);
            if existed {
                db.delete_partition(open::existing(&db, name)?)?;
            }
            db.close()?;
            tell(output, name, "dropped", existed, "does not exist")?;
            Ok(Answer::yes_if(existed))
        }
    }
}

fn tell(output: &mut Output, name: &str, verb: &str, done: bool, otherwise: &str) -> Result<()> {
    if output.json() {
        output.line(json!({ "partition": name, verb: done }))
    } else {
        output.line(format!("\"{name}\" {}", if done { verb } else { otherwise }))
    }
}
