"""Strict schemas of the custom resources that our components use: only the fields we write, so that a typo is found.

Field names from the projects' published types: LeaderWorkerSet (DisaggregatedSet v1), NVIDIA's DRA driver, KEDA, the
Prometheus operator, the Gateway API inference extension. Rules in CEL are not evaluated.
"""


def thing(required=(), **properties):
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


TEXT, COUNT, FREE = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 0}, {"type": "object"}
META = thing(["name"], name=TEXT, namespace=TEXT, labels=FREE, annotations=FREE)
SURGE = thing(["maxSurge", "maxUnavailable"], maxSurge=COUNT, maxUnavailable=COUNT)
GROUP = thing(
    ["size", "workerTemplate"],
    size={"type": "integer", "minimum": 1},
    restartPolicy={"enum": ["Default", "None", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart"]},
    workerTemplate=thing(["spec"], metadata=FREE, spec={"type": "object", "required": ["containers"]}),
    leaderTemplate=FREE,
)
ROLE = thing(
    ["name", "spec"],
    name=TEXT,
    scaling=thing(["mode"], mode={"enum": ["External"]}),
    spec=thing(
        ["leaderWorkerTemplate"],
        replicas=COUNT,
        leaderWorkerTemplate=GROUP,
        rolloutStrategy=thing(["type"], type={"const": "RollingUpdate"}, rollingUpdateConfiguration=SURGE),
    ),
)
PLACEMENT = thing(["type"], type={"enum": ["None", "ExclusiveSlice", "ExclusiveTopology"]}, topologyKey=TEXT)
LABELS = thing(["matchLabels"], matchLabels={"type": "object", "minProperties": 1})
SPECS = {
    "disaggregatedset.x-k8s.io/v1/DisaggregatedSet": thing(
        ["roles"],
        slices={"type": "integer", "minimum": 1},
        placementPolicy=PLACEMENT,
        roles={"type": "array", "items": ROLE, "minItems": 2, "maxItems": 10},
    ),
    "resource.nvidia.com/v1beta1/ComputeDomain": thing(
        ["numNodes", "channel"],
        numNodes=COUNT,
        channel=thing(["resourceClaimTemplate"], resourceClaimTemplate=thing(["name"], name=TEXT)),
    ),
    "keda.sh/v1alpha1/ScaledObject": thing(
        ["scaleTargetRef", "triggers"],
        scaleTargetRef=thing(["name"], name=TEXT, kind=TEXT, apiVersion=TEXT),
        minReplicaCount=COUNT,
        maxReplicaCount=COUNT,
        pollingInterval=COUNT,
        cooldownPeriod=COUNT,
        triggers={
            "type": "array",
            "minItems": 1,
            "items": thing(
                ["type", "metadata"],
                type={"const": "prometheus"},
                metricType={"enum": ["AverageValue", "Value"]},
                metadata=thing(["serverAddress", "query", "threshold"], serverAddress=TEXT, query=TEXT, threshold=TEXT),
            ),
        },
    ),
    "monitoring.coreos.com/v1/PodMonitor": thing(
        ["selector", "podMetricsEndpoints"],
        selector=LABELS,
        podMetricsEndpoints={"type": "array", "items": thing(["port"], port=TEXT, path=TEXT, interval=TEXT)},
        podTargetLabels={"type": "array", "items": TEXT},
    ),
    "monitoring.coreos.com/v1/PrometheusRule": thing(
        ["groups"],
        groups={
            "type": "array",
            "items": thing(
                ["name", "rules"],
                name=TEXT,
                interval=TEXT,
                rules={
                    "type": "array",
                    "items": {
                        **thing(
                            ["expr"],
                            record=TEXT,
                            alert=TEXT,
                            expr=TEXT,
                            labels=FREE,
                            annotations=FREE,
                            **{"for": TEXT},
                        ),
                        "oneOf": [{"required": ["record"]}, {"required": ["alert"]}],
                    },
                },
            ),
        },
    ),
    "inference.networking.k8s.io/v1/InferencePool": thing(
        ["selector", "targetPorts", "endpointPickerRef"],
        selector=LABELS,
        targetPorts={"type": "array", "minItems": 1, "items": thing(["number"], number=COUNT)},
        # The default is fail closed, which nobody should get by leaving it out.
        endpointPickerRef=thing(
            ["name", "failureMode"],
            name=TEXT,
            port=thing(["number"], number=COUNT),
            failureMode={"enum": ["FailOpen", "FailClose"]},
        ),
    ),
}
SCHEMAS = {
    key: thing(["apiVersion", "kind", "metadata", "spec"], apiVersion=TEXT, kind=TEXT, metadata=META, spec=spec)
    for key, spec in SPECS.items()
}


def key_of(doc) -> str:
    return f"{doc['apiVersion']}/{doc['kind']}"
