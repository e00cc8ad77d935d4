//! The file that a new partition needs before the manifest names the partition.

use crate::base::Result;
use crate::base::version_edit::{EngineKind, PartitionMeta};
use crate::lsm::tree_context::TreeResources;
use crate::pmem::pool::{PoolLocation, uses_mapped_pools};
use crate::tree::partition_tree::TreeOptions;
use crate::tree::stored_tree::pool_location;

/// Whether pools of this database are mapped files.
pub(crate) fn maps_pools(resources: &TreeResources) -> bool {
    uses_mapped_pools(&*resources.fs, &resources.dir)
}

/// The file of a partition that is being created, if it has a mapped pool. Other trees write their first file later.
pub(crate) struct NewTree {
    /// The file under its temporary name.
    created: Option<PoolLocation>,
    /// The file under its final name.
    published: Option<PoolLocation>,
}

impl NewTree {
    /// Creates the file under a temporary name. `meta` has no id yet.
    ///
    /// # Errors
    /// `OutOfSpace` if there is no space, and those of the files. Then there is no file, as far as possible.
    pub(crate) fn create(resources: &TreeResources, meta: &PartitionMeta, options: &TreeOptions) -> Result<NewTree> {
        let is_mapped = meta.engine == EngineKind::PmemMapped as u8;
        let created = is_mapped.then(|| pool_location(resources, meta));
        created.as_ref().map_or(Ok(()), |location| location.create_file(&options.pmem))?;
        Ok(NewTree { created, published: None })
    }

    /// Whether commits to the tree may be durable before the WAL is, so that the manifest must name the partition
    /// durably before the first commit.
    pub(crate) fn precedes_commits(&self) -> bool {
        self.created.is_some()
    }

    /// Gives the file the name of the partition in `meta`, durably.
    ///
    /// # Errors
    /// Those of the file system; then there is no file, as far as possible.
    pub(crate) fn publish(&mut self, resources: &TreeResources, meta: &PartitionMeta) -> Result<()> {
        debug_assert!(self.published.is_none(), "the file has its name");
        if self.created.is_some() {
            let location = pool_location(resources, meta);
            location.publish_file()?;
            self.published = Some(location);
        }
        Ok(())
    }

    /// Removes the file under its final name, because the partition will not exist.
    pub(crate) fn remove_published(&mut self) {
        if let Some(location) = self.published.take() {
            location.remove_published_file();
        }
    }

    /// Removes the file under its temporary name.
    pub(crate) fn remove_created(&self) {
        self.created.iter().for_each(PoolLocation::remove_created_file);
    }
}
