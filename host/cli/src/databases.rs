//! `oncebox databases`.

use anyhow::Result;
use oncebox_api::wire::DatabaseBody;
use oncebox_devkit::{
    api::{Api, path},
    output,
};

/// Lists the databases in which hosts place tenants.
pub(super) async fn run(api: &Api, json: bool) -> Result<()> {
    let databases: Vec<DatabaseBody> = api.get(&path(&["databases"])).await?;
    if json {
        return output::json(&databases);
    }
    let cells = |database: &DatabaseBody| {
        let DatabaseBody { name, address, weight, connections_max, tenants, .. } = database;
        let number = |number: Option<String>| number.unwrap_or_else(|| "-".to_owned());
        vec![
            name.clone(),
            number(address.clone()),
            number(weight.map(|weight| weight.to_string())),
            tenants.to_string(),
            number(connections_max.map(|most| most.to_string())),
        ]
    };
    output::table(
        &["DATABASE", "ADDRESS", "WEIGHT", "TENANTS", "CONNECTIONS MAX"],
        &databases.iter().map(cells).collect::<Vec<_>>(),
    );
    for DatabaseBody { name, error, .. } in &databases {
        if let Some(error) = error {
            println!("database `{name}`: {error}");
        }
    }
    Ok(())
}
