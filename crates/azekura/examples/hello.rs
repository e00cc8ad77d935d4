//! The smallest program: open a database, write, reopen, scan.
#![expect(clippy::disallowed_methods, reason = "clippy.toml bans system calls in the engine; an example may use them")]

use azekura::{Config, Error, PartitionCreateOptions, Result};

fn main() -> Result<()> {
    let path = std::env::temp_dir().join(format!("azekura-hello-{}", std::process::id()));
    let db = Config::new(&path).open()?;
    let fruit = db.open_partition("fruit", PartitionCreateOptions::default())?;
    fruit.insert("apple", "red")?;
    fruit.insert("banana", "yellow")?;
    drop((db, fruit)); // the last handle closes the database

    let db = Config::new(&path).open()?;
    let fruit = db.open_partition("fruit", PartitionCreateOptions::default())?;
    for pair in fruit.iter() {
        let (name, color) = pair?;
        println!("{name:?} is {color:?}");
    }
    drop(fruit);
    db.close()?;
    std::fs::remove_dir_all(&path).map_err(|error| Error::invalid(format!("{}: {error}", path.display())))
}
