"""A LangGraph graph: a model node, a tool node, and the edge back. The model is langchain-openai's."""

import sys
from pathlib import Path

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def write_file(path: str, content: str) -> str:
    """Write a text file in the work directory."""
    Path(path).write_text(content)
    return "written"


model = ChatOpenAI(model="policy").bind_tools([write_file])


def answer(state: MessagesState) -> MessagesState:
    return {"messages": [model.invoke(state["messages"])]}


graph = StateGraph(MessagesState)
graph.add_node("model", answer)
graph.add_node("tools", ToolNode([write_file]))
graph.add_edge(START, "model")
graph.add_conditional_edges("model", tools_condition)
graph.add_edge("tools", "model")
print(graph.compile().invoke({"messages": [("user", sys.argv[1])]})["messages"][-1].content)
