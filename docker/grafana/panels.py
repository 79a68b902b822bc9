"""The building blocks of the dashboards: queries, panels and variables in one style.

Queries ask for the raw metrics, not for recording rules, so that a dashboard works on any Prometheus that
scrapes a server. Every replica exposes the same runs; `once` counts a run once, however many are scraped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import prometheus as prometheus_models

DATASOURCE_UID = "noisescale-prometheus"
"""Of the datasource that provisioning/datasources/prometheus.yml sets up; every dashboard's first choice."""

DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
TAG = "noisescale"
WHOLE_MODEL = 'geometry="euclidean", group="total"'
REPLICA_LABELS = "instance, pod"

BLUE, ORANGE, GREEN, RED, GREY = "blue", "orange", "green", "red", "text"
ACTIONS = {
    0: ("hold", GREY),
    1: ("raise the batch", GREEN),
    2: ("lower the batch", ORANGE),
    3: ("fix the learning rate first", RED),
}


def once(metric: str, selector: str = "", *, dropping: str = "") -> str:
    """PromQL for a run's metric, once for all replicas; `dropping` names further labels to leave out."""
    labels = ", ".join(filter(None, [REPLICA_LABELS, dropping]))
    return f"max without ({labels}) ({metric}{{{selector}}})"


def once_rate(metric: str, selector: str = "") -> str:
    """PromQL for the growth per second of a run's counter."""
    return f"max without ({REPLICA_LABELS}) (rate({metric}{{{selector}}}[$__rate_interval]))"


def per_run(metric: str, selector: str = "") -> str:
    """PromQL for one value a run with no label but run_id, so that table columns join on it."""
    return f"max by (run_id) ({metric}{{{selector}}})"


def action_code(selector: str) -> str:
    """PromQL for the advice as a number, see ACTIONS: state timelines and tables colour numbers."""
    terms = [
        f"{code} * " + per_run("noisescale_recommendation", f'{selector}, action="{action}"')
        for code, action in enumerate(["raise", "lower", "lr_only"], start=1)
    ]
    return " + ".join(terms)


def query(expr: str, legend: str = "", *, ref: str = "A", instant: bool = False) -> prometheus.Dataquery:
    """One target of a panel."""
    built = prometheus.Dataquery().ref_id(ref).datasource(DATASOURCE).expr(expr).legend_format(legend)
    return built.instant() if instant else built.range()


def column(expr: str, *, ref: str) -> prometheus.Dataquery:
    """One column of a table: the values now."""
    return query(expr, ref=ref, instant=True).format(prometheus_models.PromQueryFormat.TABLE)


def lines(
    title: str,
    targets: Sequence[prometheus.Dataquery],
    *,
    description: str,
    unit: str = "short",
    width: int = 12,
    height: int = 8,
    log: bool = False,
    axis_label: str = "",
) -> timeseries.Panel:
    """A chart over time. On a log axis Grafana leaves out what is not positive."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .targets(list(targets))
        .unit(unit)
        .span(width)
        .height(height)
        .axis_label(axis_label)
        .line_width(2)
        .show_points(common_models.VisibilityMode.NEVER)
        .tooltip(
            common.VizTooltipOptions()
            .mode(common_models.TooltipDisplayMode.MULTI)
            .sort(common_models.SortOrder.DESCENDING)
        )
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(common_models.LegendDisplayMode.LIST)
            .placement(common_models.LegendPlacement.BOTTOM)
        )
    )
    if log:
        scale = common.ScaleDistributionConfig().type(common_models.ScaleDistribution.LOG).log(10)
        panel = panel.scale_distribution(scale)
    return panel


def number(
    title: str,
    expr: str,
    *,
    description: str,
    unit: str = "short",
    width: int = 4,
    decimals: int | None = None,
    no_value: str = "-",
    mappings: Sequence[models.ValueMap] = (),
    colour: str = BLUE,
    legend: str = "",
    name_only: bool = False,
) -> stat.Panel:
    """One big number, as it is now; or with `name_only` the legends of what the query answers."""
    panel = (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .with_target(query(expr, legend, instant=True))
        .unit(unit)
        .span(width)
        .height(4)
        .no_value(no_value)
        .mappings(list(mappings))
        .graph_mode(common_models.BigValueGraphMode.NONE)
        .color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.FIXED).fixed_color(colour))
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .text_mode(common_models.BigValueTextMode.NAME if name_only else common_models.BigValueTextMode.VALUE)
    )
    return panel if decimals is None else panel.decimals(decimals)


def states(title: str, expr: str, legend: str, *, description: str, height: int = 8) -> statetimeline.Panel:
    """The advice over time, one coloured bar per run."""
    return (
        statetimeline.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .with_target(query(expr, legend))
        .mappings([action_names()])
        .merge_values(True)
        .show_value(common_models.VisibilityMode.AUTO)
        .row_height(0.9)
        .legend(common.VizLegendOptions().show_legend(False))
        .tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.SINGLE))
        .color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.FIXED).fixed_color(GREY))
        .span(24)
        .height(height)
    )


def action_names() -> models.ValueMap:
    """The advice as a coloured word, for what action_code answers."""
    return models.ValueMap(
        {
            str(code): models.ValueMappingResult(text=text, color=colour, index=code)
            for code, (text, colour) in ACTIONS.items()
        }
    )


def joined_table(
    title: str,
    columns: Mapping[str, tuple[str, str]],
    *,
    description: str,
    key: str,
    key_name: str,
    height: int = 10,
    sort_by: str | None = None,
) -> table.Panel:
    """Instant queries joined on the label `key`.

    Args:
        columns: Heading to (PromQL that answers one value per `key`, unit), in their order.
        key_name: Heading of the first column.
    """
    refs = [chr(ord("A") + index) for index in range(len(columns))]
    names = {f"Value #{ref}": heading for ref, heading in zip(refs, columns, strict=True)}
    order = {key: 0} | {value: index for index, value in enumerate(names, start=1)}
    hidden = {"Time": True} | {f"Time {index}": True for index in range(1, len(columns) + 1)}
    panel = (
        table.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .targets([column(expr, ref=ref) for ref, (expr, _) in zip(refs, columns.values(), strict=True)])
        .with_transformation(
            models.DataTransformerConfig(id_val="joinByField", options={"byField": key, "mode": "outer"})
        )
        .with_transformation(
            models.DataTransformerConfig(
                id_val="organize",
                options={
                    "excludeByName": hidden,
                    "indexByName": order,
                    "renameByName": names | {key: key_name},
                },
            )
        )
        .filterable(True)
        .show_header(True)
        .span(24)
        .height(height)
    )
    for heading, (_, unit) in columns.items():
        panel = panel.override_by_name(heading, [models.DynamicConfigValue(id_val="unit", value=unit)])
    if sort_by is not None:
        panel = panel.sort_by([common.TableSortByFieldState().display_name(sort_by).desc(True)])
    return panel


def coloured_words(panel: table.Panel, heading: str) -> table.Panel:
    """Show an action_code column of a table as coloured words."""
    return panel.override_by_name(
        heading,
        [
            models.DynamicConfigValue(id_val="mappings", value=[action_names()]),
            models.DynamicConfigValue(
                id_val="custom.cellOptions", value=common_models.TableColorTextCellOptions()
            ),
        ],
    )


@dataclass(frozen=True)
class Annotation:
    """A mark on every chart wherever a query answers; `text` may name its labels as {{label}}."""

    name: str
    expr: str
    text: str
    colour: str

    def builder(self) -> Builder[models.AnnotationQuery]:
        return _AnnotationBuilder(self)


class _PrometheusAnnotation(models.AnnotationQuery):
    """The SDK's type has no field for the text that Grafana's Prometheus datasource renders."""

    text: str

    def to_json(self) -> dict[str, object]:
        # As `target` since Grafana 12, beside the query as `expr` before.
        target = {"refId": "Anno", "expr": self.expr, "datasource": self.datasource}
        return super().to_json() | {"titleFormat": self.text, "target": target}


class _AnnotationBuilder(Builder[models.AnnotationQuery]):
    def __init__(self, annotation: Annotation) -> None:
        self._annotation = annotation

    def build(self) -> models.AnnotationQuery:
        built = _PrometheusAnnotation(
            name=self._annotation.name,
            datasource=DATASOURCE,
            expr=self._annotation.expr,
            icon_color=self._annotation.colour,
        )
        built.text = self._annotation.text
        return built


def base(
    title: str, *, uid: str, description: str, variables: Sequence[Builder[models.VariableModel]]
) -> dashboard.Dashboard:
    """An empty dashboard with what all have: the datasource to choose, and links to the others."""
    built = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags([TAG])
        .editable()
        .refresh("30s")
        .time("now-6h", "now")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("noisescale")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(True)
            .keep_time(True)
            .include_vars(True)
        )
        .with_variable(
            dashboard.DatasourceVariable("datasource")
            .label("Prometheus")
            .type("prometheus")
            .current(models.VariableOption(selected=True, text="noisescale", value=DATASOURCE_UID))
        )
    )
    for variable in variables:
        built = built.with_variable(variable)
    return built


def label_variable(
    name: str, *, label: str, values_of: str, multi: bool, description: str, all_value: str | None = None
) -> dashboard.QueryVariable:
    """A choice of label values, renewed with the time range.

    Args:
        all_value: What "All" stands for; the list of the values if left out.
    """
    variable = (
        dashboard.QueryVariable(name)
        .label(label)
        .description(description)
        .datasource(DATASOURCE)
        .query({"query": values_of, "refId": "PrometheusVariableQueryEditor-VariableQuery", "qryType": 5})
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(multi)
        .include_all(multi)
    )
    if multi:
        variable = variable.current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
    return variable if all_value is None else variable.all_value(all_value)


def fixed(colour: str) -> models.DynamicConfigValue:
    """An override property: always this colour."""
    return models.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": colour})
