//! The smallest program: write, read, scan, reopen.
#![expect(clippy::disallowed_methods, reason = "the bans of clippy.toml are for the engine; a program asks the system")]

use azekura::{Config, PartitionCreateOptions, Result};

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
    db.close()
}
