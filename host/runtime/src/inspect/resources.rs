//! Resources that an instance of a component takes of the pool, counted from the binary alone.
//!
//! Definitions are not instances: a module that is instantiated twice counts twice, a module
//! without an instance not at all. A few bytes can ask for an exponential number of instances,
//! hence the saturating sums.

use wasmparser::{ComponentAlias, ComponentInstance, ComponentOuterAliasKind, Instance};

/// Bytes of a page, unless a memory declares another size.
const PAGE_BYTES: u64 = 1 << 16;

/// Memories, tables and core instances, summed over everything that is instantiated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Resources {
    /// Linear memories.
    pub(super) memories: u64,
    /// Memories of the module with the most.
    pub(super) memories_of_module: u64,
    /// Bytes of all memories at the start.
    pub(super) memory_bytes: u64,
    pub(super) tables: u64,
    /// Tables of the module with the most.
    pub(super) tables_of_module: u64,
    /// Elements of the largest table at the start.
    pub(super) table_elements: u64,
    pub(super) core_instances: u64,
}

impl Resources {
    fn add(&mut self, other: Self) {
        self.memories = self.memories.saturating_add(other.memories);
        self.memory_bytes = self.memory_bytes.saturating_add(other.memory_bytes);
        self.memories_of_module = self.memories_of_module.max(other.memories_of_module);
        self.tables_of_module = self.tables_of_module.max(other.tables_of_module);
        self.tables = self.tables.saturating_add(other.tables);
        self.table_elements = self.table_elements.max(other.table_elements);
        self.core_instances = self.core_instances.saturating_add(other.core_instances);
    }

    pub(super) fn add_memory(&mut self, memory: &wasmparser::MemoryType) {
        let page = memory
            .page_size_log2
            .map_or(PAGE_BYTES, |log2| 1u64.checked_shl(log2).unwrap_or(PAGE_BYTES));
        let bytes = memory.initial.saturating_mul(page);
        self.memories = self.memories.saturating_add(1);
        self.memory_bytes = self.memory_bytes.saturating_add(bytes);
        self.memories_of_module = self.memories_of_module.saturating_add(1);
    }

    pub(super) fn add_table(&mut self, table: &wasmparser::TableType) {
        self.tables = self.tables.saturating_add(1);
        self.tables_of_module = self.tables_of_module.saturating_add(1);
        self.table_elements = self.table_elements.max(table.initial);
    }
}

/// The index spaces of a component that an instantiation refers to. An import is unknown and counts
/// as nothing: a handler is given no modules.
#[derive(Debug, Default)]
pub(super) struct Scope {
    modules: Vec<Resources>,
    components: Vec<Resources>,
    resources: Resources,
}

/// The component being read, which is last, and the components around it.
#[derive(Debug, Default)]
pub(super) struct Scopes {
    stack: Vec<Scope>,
}

impl Scopes {
    pub(super) fn enter(&mut self) {
        self.stack.push(Scope::default());
    }

    /// Ends the innermost component and returns its resources. Those of the outermost component are
    /// the result.
    pub(super) fn leave(&mut self) -> Resources {
        let resources = self.stack.pop().map(|scope| scope.resources).unwrap_or_default();
        if let Some(scope) = self.stack.last_mut() {
            scope.components.push(resources);
        }
        resources
    }

    pub(super) fn depth(&self) -> usize {
        self.stack.len()
    }

    pub(super) fn define_module(&mut self, resources: Resources) {
        if let Some(scope) = self.stack.last_mut() {
            scope.modules.push(Resources { core_instances: 1, ..resources });
        }
    }

    pub(super) fn import_module(&mut self) {
        self.define_module(Resources::default());
    }

    pub(super) fn import_component(&mut self) {
        if let Some(scope) = self.stack.last_mut() {
            scope.components.push(Resources::default());
        }
    }

    pub(super) fn instantiate_module(&mut self, instance: &Instance<'_>) {
        if let (Instance::Instantiate { module_index, .. }, Some(scope)) =
            (instance, self.stack.last_mut())
        {
            scope
                .resources
                .add(scope.modules.get(*module_index as usize).copied().unwrap_or_default());
        }
    }

    pub(super) fn instantiate_component(&mut self, instance: &ComponentInstance<'_>) {
        if let (ComponentInstance::Instantiate { component_index, .. }, Some(scope)) =
            (instance, self.stack.last_mut())
        {
            scope
                .resources
                .add(scope.components.get(*component_index as usize).copied().unwrap_or_default());
        }
    }

    pub(super) fn alias(&mut self, alias: &ComponentAlias<'_>) {
        use wasmparser::ComponentExternalKind::{Component, Module};
        match alias {
            ComponentAlias::InstanceExport { kind: Module, .. } => self.import_module(),
            ComponentAlias::InstanceExport { kind: Component, .. } => self.import_component(),
            ComponentAlias::Outer { kind, count, index } => {
                self.alias_outer(*kind, *count as usize, *index as usize)
            }
            ComponentAlias::InstanceExport { .. } | ComponentAlias::CoreInstanceExport { .. } => {}
        }
    }

    fn alias_outer(&mut self, kind: ComponentOuterAliasKind, count: usize, index: usize) {
        let outer = self.stack.iter().nth_back(count);
        let found = match kind {
            ComponentOuterAliasKind::CoreModule => outer.and_then(|scope| scope.modules.get(index)),
            ComponentOuterAliasKind::Component => {
                outer.and_then(|scope| scope.components.get(index))
            }
            ComponentOuterAliasKind::CoreType | ComponentOuterAliasKind::Type => return,
        };
        let resources = found.copied().unwrap_or_default();
        if let Some(scope) = self.stack.last_mut() {
            let space = if matches!(kind, ComponentOuterAliasKind::CoreModule) {
                &mut scope.modules
            } else {
                &mut scope.components
            };
            space.push(resources);
        }
    }

    /// Adds an export, which is a new index of the exported item.
    pub(super) fn export(&mut self, export: &wasmparser::ComponentExport<'_>) {
        use wasmparser::ComponentExternalKind::{Component, Module};
        let Some(scope) = self.stack.last_mut() else { return };
        let space = match export.kind {
            Module => &mut scope.modules,
            Component => &mut scope.components,
            _ => return,
        };
        let resources = space.get(export.index as usize).copied().unwrap_or_default();
        space.push(resources);
    }
}
