//! Catalog of partitions: maps names to partitions.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, RwLock};

use crate::base::comparator::BYTEWISE_NAME;
use crate::base::manifest_state::PartitionManifestState;
use crate::base::sync::{read, write};
use crate::base::version_edit::{FileNumber, PartitionMeta};
use crate::base::{KeyOrder, Result};
use crate::db::components::PartitionComponents;
use crate::db::options::PartitionCreateOptions;
use crate::db::partition_state::{PartitionState, ReplayPhase};
use crate::lsm::tree_context::TreeResources;
use crate::tree::stored_tree::{StoredTree, engine_kind};
use crate::vfs::open_files::DataFileKind;

/// All partitions of a database. Thread safe.
pub(crate) struct Catalog {
    resources: Arc<TreeResources>,
    by_name: RwLock<BTreeMap<Arc<str>, Arc<PartitionState>>>,
}

impl Catalog {
    pub(crate) fn new(resources: Arc<TreeResources>) -> Catalog {
        Catalog { resources, by_name: RwLock::default() }
    }

    pub(crate) fn resources(&self) -> &Arc<TreeResources> {
        &self.resources
    }

    pub(crate) fn get(&self, name: &str) -> Option<Arc<PartitionState>> {
        read(&self.by_name).get(name).cloned()
    }

    pub(crate) fn names(&self) -> Vec<String> {
        read(&self.by_name).keys().map(|name| name.to_string()).collect()
    }

    /// All partitions, ordered by name.
    pub(crate) fn all(&self) -> Vec<Arc<PartitionState>> {
        read(&self.by_name).values().cloned().collect()
    }

    /// Bytes of disk space that the next checkpoints of all trees need in addition to their files.
    pub(crate) fn checkpoint_bytes(&self) -> u64 {
        let partitions = self.all();
        let trees = partitions.iter().filter_map(|partition| partition.tree_if_built());
        trees.fold(0, |bytes, tree| bytes.saturating_add(tree.checkpoint_bytes()))
    }

    pub(crate) fn remove(&self, name: &str) {
        write(&self.by_name).remove(name);
    }

    /// Adds a partition of the manifest and checks its files. A partition with a custom comparator has no tree until
    /// the comparator is given.
    pub(crate) fn restore_partition(
        &self,
        stored: PartitionManifestState,
        files: &HashMap<(DataFileKind, FileNumber), u64>,
    ) -> Result<Arc<PartitionState>> {
        let state = self.read_partition(stored, files)?;
        self.insert(&state);
        Ok(state)
    }

    /// As [`restore_partition`](Catalog::restore_partition). The partition is not visible until it is
    /// [inserted](Catalog::insert).
    pub(crate) fn read_partition(
        &self,
        stored: PartitionManifestState,
        files: &HashMap<(DataFileKind, FileNumber), u64>,
    ) -> Result<Arc<PartitionState>> {
        let meta = stored.meta.clone();
        let (merge_operator, uses_expiry) = (stored.merge_operator.clone(), stored.uses_expiry);
        engine_kind(&meta)?; // before its options, which a newer version may have written
        let options = PartitionCreateOptions::decode(&meta.settings)?;
        let tree_options = options.tree(self.resources.default_codec);
        let stored_tree = StoredTree::of_manifest(&self.resources, stored, files, &tree_options)?;
        let state = Arc::new(PartitionState::new(&meta, merge_operator, stored_tree));
        state.expiry.set_default_ttl_ms(options.default_ttl_ms());
        if uses_expiry {
            state.expiry.note_use(&self.resources.snapshots);
        }
        if meta.comparator == BYTEWISE_NAME {
            state.build_tree(&self.resources, KeyOrder::bytewise(), &tree_options, ReplayPhase::Before)?;
        }
        Ok(state)
    }

    /// Creates a new partition, which is not visible until it is [inserted](Catalog::insert).
    pub(crate) fn create_tree(
        &self,
        meta: &PartitionMeta,
        order: KeyOrder,
        options: &PartitionCreateOptions,
    ) -> Result<Arc<PartitionState>> {
        let tree_options = options.tree(self.resources.default_codec);
        let stored_tree = StoredTree::of_new(&self.resources, meta, &tree_options)?;
        let state = Arc::new(PartitionState::new(meta, None, stored_tree));
        state.expiry.set_default_ttl_ms(options.default_ttl_ms());
        state.build_tree(&self.resources, order, &tree_options, ReplayPhase::After)?;
        Ok(state)
    }

    /// Adds a partition to the catalog.
    pub(crate) fn insert(&self, state: &Arc<PartitionState>) {
        write(&self.by_name).insert(Arc::clone(&state.name), Arc::clone(state));
    }

    /// Prepares an existing partition for a caller. Builds its tree, if the tree was waiting for the comparator.
    /// `phase` says how.
    ///
    /// # Errors
    /// `Invalid` if the comparator or the engine of `options` is not the one the partition was created with, or if
    /// `options` do not fit the comparator.
    pub(crate) fn open(
        &self,
        state: &Arc<PartitionState>,
        components: &PartitionComponents,
        options: &PartitionCreateOptions,
        phase: ReplayPhase,
    ) -> Result<()> {
        let new_operator = state.merge_operator.new_one(components)?;
        let order = components.key_order();
        state.check_comparator(&order)?;
        state.check_engine(options)?;
        options.check_order(&order)?;
        let stored = state.stored_options()?.tree(self.resources.default_codec);
        state.build_tree(&self.resources, order, &stored, phase)?;
        state.set_components(components);
        if let (None, Some(operator)) = (new_operator, &components.merge_operator) {
            state.set_merge_operator(operator);
        }
        Ok(())
    }

    /// Whether `options` lower the size limit of a tree below the stored one. The WAL was written under the stored
    /// limit, so it must not be replayed under the lower one.
    pub(crate) fn lowers_max_size(&self, state: &PartitionState, options: &PartitionCreateOptions) -> Result<bool> {
        let codec = self.resources.default_codec;
        Ok(state.tree()?.lowers_max_size(&options.tree(codec), &state.stored_options()?.tree(codec)))
    }

    /// In a follower: takes over what the manifest says about a partition, except its tables and blob files.
    pub(crate) fn follow(&self, state: &PartitionState, stored: &PartitionManifestState) -> Result<()> {
        if stored.uses_expiry {
            state.expiry.note_use(&self.resources.snapshots);
        }
        if let Some(name) = &stored.merge_operator {
            state.note_merge_operator(name);
        }
        if !state.has_settings(&stored.meta.settings) {
            let options = PartitionCreateOptions::decode(&stored.meta.settings)?;
            state.note_settings(stored.meta.settings.clone());
            state.expiry.set_default_ttl_ms(options.default_ttl_ms());
            if let Some(tree) = state.tables_if_built() {
                tree.set_options(options.tree(self.resources.default_codec).lsm);
            }
        }
        Ok(())
    }

    /// Applies options to new data, and does not store them.
    pub(crate) fn set_options(&self, state: &PartitionState, options: &PartitionCreateOptions) -> Result<()> {
        state.tree()?.set_options(&options.tree(self.resources.default_codec))?;
        state.expiry.set_default_ttl_ms(options.default_ttl_ms());
        Ok(())
    }
}
